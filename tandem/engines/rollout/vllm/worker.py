"""Methods that run inside vLLM's workers: new weights in, the digest of the weights held out.

Importing this module makes vLLM keep the weights of linear layers as they were loaded, on CPUs too. Else it
packs them there into the formats of its kernels and drops the originals, and the packed copy of a tied
output layer goes stale when the embedding is loaded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers import utils as vllm_layers

from tandem.engines.rollout.vllm.channel import Backend, Group, Layout, unpacked
from tandem.engines.rollout.vllm.shards import weights_digest
from tandem.errors import EngineError, TandemError

_pack = vllm_layers.dispatch_cpu_unquantized_gemm


def _keep(layer: Any, remove_weight: bool) -> None:
    if layer.weight.dim() == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:  # of convolutions
        _pack(layer, remove_weight)


vllm_layers.dispatch_cpu_unquantized_gemm = _keep


class WorkerExtension:
    """Methods that vLLM mixes into its worker (`--worker-extension-cls`), called by `collective_rpc`."""

    model_runner: Any
    device: torch.device
    tandem_group: Group

    def tandem_load(self, path: str, size: int, layout: Layout) -> None:
        """Takes over the weights in a file in shared memory.

        Args:
            size: of the file, bytes.
        """
        shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        load_weights(self.model_runner.model, unpacked(shared, layout))

    def tandem_device(self) -> str:
        return self.device.type

    def tandem_join(self, address: str, port: int, backend: Backend) -> None:
        """Makes a process group with the trainer and the other workers, in the place of an earlier one.

        Args:
            address, port: of the trainer's store.
        """
        ranks = get_tp_group()
        self.tandem_group = Group.joined(address, port, backend, ranks.rank_in_group, ranks.world_size)

    def tandem_receive(self, size: int, layout: Layout) -> None:
        """Takes over the weights in a bucket that the trainer sends, of that many bytes."""
        bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.tandem_group.broadcast(bucket).wait()
        load_weights(self.model_runner.model, unpacked(bucket, layout))

    def tandem_digest(self) -> dict[str, str]:
        """The digest of the weights that all workers hold together, as text: few readers of JSON take 64
        bits."""
        return {name: str(value) for name, value in weights_digest(self.model_runner.model).items()}


def load_weights(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies weights into those of a model of vLLM.

    Args:
        tensors: whole tensors by Hugging Face name, each used before the next is asked for.

    Raises:
        EngineError: weights of another model, or of another type than the model's.
    """
    dtype = next(model.parameters()).dtype

    def checked() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if tensor.dtype != dtype:
                raise EngineError(
                    "the weights come in another type than vLLM holds them",
                    field=name,
                    got=tensor.dtype,
                    expected=dtype,
                    remedy="set actor_rollout_ref.rollout.dtype to the type that the actor computes in",
                )
            yield name, tensor

    try:
        with torch.no_grad():
            model.load_weights(checked())
    except TandemError:
        raise
    except (ValueError, KeyError, AssertionError, AttributeError) as error:
        raise EngineError(
            "the weights are of another model than vLLM has loaded",
            got=f"{type(error).__name__}: {error}",
            expected=type(model).__name__,
            remedy="give actor and rollout the same actor_rollout_ref.model.path",
        ) from error
