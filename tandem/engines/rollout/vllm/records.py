"""The experts that computed the tokens of vLLM's responses.

vLLM keeps them by blocks of tokens, so it also knows them for prompts whose keys and values it finds in its
cache. It records them only in its model runner for GPUs. `record_on_host` adds this to its runner for CPUs.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
from vllm.model_executor.layers.fused_moe.layer import MoERunner


def mixture_layers(model: Any) -> list[int]:
    """Return the numbers of the layers of a vLLM model that have a mixture of experts, in ascending order."""
    return sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))


def experts_so_far(engine: Any, name: str) -> np.ndarray:
    """Return the experts that a vLLM engine has recorded for a request that is not finished.

    Args:
        engine: vLLM's engine.
        name: The request's name.

    Returns:
        (N, layers, K) integers, for all N tokens of prompt and response but the last.
    """
    outputs = engine.output_processor
    [inner] = outputs.external_req_ids[name]
    return np.concatenate(outputs.request_states[inner].routed_experts_chunks)


def routed_experts(recorded: np.ndarray, layers: list[int]) -> np.ndarray:
    """Return `Sample.routed_experts` of a response.

    Args:
        recorded: (P + R - 1, all layers, K) uint8 or uint16, what vLLM recorded.
        layers: The numbers of the layers with a mixture.
    """
    chosen = recorded[:, layers].astype(np.uint8 if recorded.dtype == np.uint8 else np.int16)
    return np.pad(chosen, ((0, 1), (0, 0), (0, 0)))


def record_on_host(worker: Any) -> None:
    """Let the model runner of a vLLM worker on a CPU record the experts of each step."""
    runner = worker.model_runner
    recorder = AuxOutputWorkerConnector(
        vllm_config=runner.vllm_config, model=runner.model, kv_cache_config=runner.kv_cache_config
    )
    weakref.finalize(runner, recorder.close)
    execute, sample = runner.execute_model, runner.sample_tokens
    counts: dict[str, int] = {}

    def execute_model(scheduled: Any, *args: Any) -> Any:
        recorder.begin_step(scheduled.aux_output_connector_metadata)
        counts.clear()
        counts.update(scheduled.num_scheduled_tokens)
        return execute(scheduled, *args)

    def sample_tokens(*args: Any) -> Any:
        output, batch = sample(*args), runner.input_batch
        names = batch.req_ids
        step = SimpleNamespace(
            req_ids=names,
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(names)],
            query_start_loc_np=np.cumsum([0, *(counts[name] for name in names)]),
        )
        pending = recorder.prepare_output(step)
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
