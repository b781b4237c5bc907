"""The former path of `vllm.worker`. Commands that start a vLLM server may still use this path."""

from tandem.engines.rollout.vllm.worker import WorkerExtension as WorkerExtension
