"""Methods that run inside vLLM's workers. They load new weights and compute the digest of the weights.

Importing this module makes vLLM keep the weights of linear layers as they were loaded, on CPUs too. Otherwise
vLLM packs them on CPUs into the formats of its kernels and drops the originals. The packed copy of a tied
output layer would then be out of date when the embedding is loaded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers import utils as vllm_layers

from tandem.engines.rollout.http.channel import Backend, Group, Layout, unpacked
from tandem.engines.rollout.vllm.shards import weights_digest
from tandem.errors import EngineError, TandemError

_pack = vllm_layers.dispatch_cpu_unquantized_gemm


def _keep(layer: Any, remove_weight: bool) -> None:
    if layer.weight.dim() == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:  # the weight of a convolution
        _pack(layer, remove_weight)


vllm_layers.dispatch_cpu_unquantized_gemm = _keep


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
        return {name: str(value) for name, value in weights_digest(self.model_runner.model).items()}


def load_weights(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into the weights of a vLLM model.

    Args:
        model: The model.
        tensors: Pairs of Hugging Face name and whole tensor. Each tensor is used before the next one is
            requested.

    Raises:
        EngineError: The weights belong to another model, or have another dtype than the model's weights.
    """
    dtype = next(model.parameters()).dtype

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if tensor.dtype != dtype:
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
