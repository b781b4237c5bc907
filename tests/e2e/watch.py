from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tandem.engines.train.fsdp import FSDPEngine
from tandem.models.packing import PackedInputs
from tandem.models.policy import PolicyModel


@dataclass(frozen=True)
class MicroBatch:
    """The sequences and tokens of one forward; a sequence's last token predicts nothing and is left out."""

    sequences: int
    tokens: int

    @property
    def whole_tokens(self) -> int:
        """Return the number of tokens in the sequences, without padding."""
        return self.tokens + self.sequences


@dataclass
class Watched:
    """The micro-batches of a run by phase, layers that ran with gradients, and what moved to the host."""

    update: list[MicroBatch] = field(default_factory=list)
    old_log_prob: list[MicroBatch] = field(default_factory=list)
    ref: list[MicroBatch] = field(default_factory=list)
    layer_forwards: int = 0
    moved: Counter[str] = field(default_factory=Counter)


def watch(patch: pytest.MonkeyPatch) -> Watched:
    seen, warms_up = Watched(), False
    forward, layer = PolicyModel.forward, Qwen2DecoderLayer.forward
    offload, onload = FSDPEngine.offload, FSDPEngine.onload
    warm_up = FSDPEngine._warm_up

    def watched_warm_up(self: FSDPEngine, *model):
        nonlocal warms_up
        warms_up = True
        warm_up(self, *model)
        warms_up = False

    def watched_forward(self: PolicyModel, inputs: PackedInputs, outputs: frozenset[str]):
        if outputs and not warms_up:
            frozen = not any(p.requires_grad for p in self.parameters())
            phase = seen.update if torch.is_grad_enabled() else seen.ref if frozen else seen.old_log_prob
            phase.append(MicroBatch(len(inputs.packing.cu_seqlens) - 1, len(inputs.input_ids)))
        return forward(self, inputs, outputs)

    def watched_layer(self: Qwen2DecoderLayer, *args, **kwargs):
        seen.layer_forwards += torch.is_grad_enabled()
        return layer(self, *args, **kwargs)

    def moved(engine: FSDPEngine, optimizer: bool) -> None:
        owner = "actor" if engine._state.optimizers else "ref"
        seen.moved[f"{owner} parameters"] += engine._fsdp.param_offload
        seen.moved[f"{owner} optimizer"] += optimizer and engine._fsdp.optimizer_offload

    def watched_onload(self: FSDPEngine, *, optimizer: bool) -> None:
        moved(self, optimizer)
        onload(self, optimizer=optimizer)

    patch.setattr(FSDPEngine, "_warm_up", watched_warm_up)
    patch.setattr(PolicyModel, "forward", watched_forward)
    patch.setattr(Qwen2DecoderLayer, "forward", watched_layer)
    patch.setattr(FSDPEngine, "offload", lambda self: (moved(self, True), offload(self)))
    patch.setattr(FSDPEngine, "onload", watched_onload)
    return seen
