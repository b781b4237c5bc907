"""Methods that run inside vLLM's workers. They load new weights and compute the digest of the weights.

Importing this module makes vLLM keep the weights of linear layers and experts as they were loaded, on CPUs
too. Otherwise vLLM packs them on CPUs into the formats of its kernels and drops the originals. New weights
could then not be loaded into experts, and the packed copy of a tied output layer would be out of date when
the embedding is loaded again.

It also replaces vLLM's rotary embedding on CPUs, which is wrong if pairs of neighbours are rotated and heads
have their own dimension, as in DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from tandem.engines.rollout.http.channel import Backend, Group, Layout, unpacked
from tandem.engines.rollout.vllm.shards import weights_digest
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError, TandemError

_pack = vllm_layers.dispatch_cpu_unquantized_gemm


def _keep(layer: Any, remove_weight: bool) -> None:
    if layer.weight.dim() == 2:
        layer.cpu_linear = F.linear
    else:  # the weight of a convolution
        _pack(layer, remove_weight)


vllm_layers.dispatch_cpu_unquantized_gemm = _keep


class _PlainExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Methods that replace those of vLLM's experts on CPUs. They compute one expert after the other."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.activate = get_act_and_mul_fn(layer.activation.value).forward_native

    @torch.no_grad()
    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor,
        topk_ids: Tensor, *_: Any, apply_router_weight_on_input: bool, **unused: Any,
    ) -> None:  # fmt: skip
        output.zero_()
        for expert in set(topk_ids.flatten().tolist()):
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            up_bias, down_bias = (
                None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias)
            )
            inner = self.activate(F.linear(hidden_states[rows], w1[expert], up_bias))
            part = F.linear(inner, w2[expert], down_bias)
            if not apply_router_weight_on_input:
                part = part * topk_weights[rows, places, None]
            output.index_add_(0, rows, part.to(output.dtype))


for _name in ("_supports_grouped_gemm", "process_weights_after_loading", "apply"):
    setattr(CPUUnquantizedExperts, _name, vars(_PlainExperts)[_name])
RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


class WorkerExtension:
    """Methods that vLLM adds to its workers (`--worker-extension-cls`) and that `collective_rpc` calls."""

    model_runner: Any
    device: torch.device
    tandem_group: Group

    def tandem_load(self, path: str, size: int, layout: Layout) -> None:
        """Load the weights of a bucket in a shared-memory file.

        Args:
            path: The path of the file.
            size: The file's size in bytes.
            layout: The layout of the tensors.
        """
        shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        load_weights(self.model_runner.model, unpacked(shared, layout))

    def tandem_device(self) -> str:
        return self.device.type

    def tandem_join(self, address: str, port: int, backend: Backend) -> None:
        """Create a process group with the trainer and the other workers. It replaces an earlier group.

        Args:
            address: The address of the trainer's store.
            port: The port of the trainer's store.
            backend: The torch.distributed backend.
        """
        ranks = get_tp_group()
        self.tandem_group = Group.joined(address, port, backend, ranks.rank_in_group, ranks.world_size)

    def tandem_receive(self, size: int, layout: Layout) -> None:
        """Receive a bucket of `size` bytes from the trainer and load its weights."""
        bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.tandem_group.broadcast(bucket).wait()
        load_weights(self.model_runner.model, unpacked(bucket, layout))

    def tandem_digest(self) -> dict[str, str]:
        """Return the digest of the whole weights, which covers the shards of all workers.

        The values are text, because few JSON readers support 64-bit integers.
        """
        return {name: str(value) for name, value in finish_loading(self.model_runner.model).items()}


def load_weights(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into the weights of a vLLM model. Call `finish_loading` after the last one.

    Args:
        model: The model.
        tensors: Pairs of name in published folders (see `StoredLayout`) and whole tensor. Each tensor is used
            before the next one is requested.

    Raises:
        EngineError: The weights belong to another model, or have another dtype than the model's weights.
    """
    dtype = next(model.parameters()).dtype
    wide = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            is_wide = tensor.dtype == torch.float32 and name.rpartition(".")[2] in wide - {"weight", "bias"}
            if tensor.dtype != dtype and not is_wide:
                raise EngineError(
                    "the weights have another dtype than vLLM's weights",
                    field=name,
                    got=tensor.dtype,
                    expected=dtype,
                    remedy="set actor_rollout_ref.rollout.dtype to the actor's compute dtype",
                )
            yield name, tensor

    try:
        with torch.no_grad():
            model.load_weights(checked())
    except TandemError:
        raise
    except (ValueError, KeyError, AssertionError, AttributeError) as error:
        raise EngineError(
            "the weights belong to another model than vLLM has loaded",
            got=f"{type(error).__name__}: {error}",
            expected=type(model).__name__,
            remedy="give actor and rollout the same actor_rollout_ref.model.path",
        ) from error


def finish_loading(model: Any) -> Digest:
    """Compute what vLLM derives from its weights, and return the digest of the weights."""
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            layer.process_weights_after_loading(next(model.parameters()).dtype)
    return weights_digest(model)
