"""The former path of `vllm.worker`, which the commands that start a vLLM server may still name."""

from tandem.engines.rollout.vllm.worker import WorkerExtension as WorkerExtension
