"""The verdict of the check of packed sequences, and the errors that follow from it; see `packed_check`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import ModelError

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The maximum mean error of a log-prob, in nats, that rounding may cause with a run's weights."""
_unfit = partial(ModelError, field="model.path")
_OTHERS, _ALONE = 1e-12, 1e-6


@dataclass(frozen=True, slots=True)
class PackedCheck:
    """The results of testing an architecture with a small copy.

    Differences of log-probs or scores above 1 are relative.

    Attributes:
        gradient: the largest entry of the gradient of one sequence's log-probs with respect to the embeddings
            of the other sequences in the same row. It must be 0.
        others: the largest change of one sequence's log-probs when the tokens of the other sequences change.
        alone: the largest difference from transformers' model, run on each sequence alone. The sequences are
            shorter than every window, chunk and limit of rotary angles.
        beyond: the same difference as `alone`, for sequences that are longer than all of these limits.
        failure: the reason why packed sequences beyond the limits cannot be computed at all; None if they can
            be computed.
        limit: the lowest of the config's limits, in tokens; None if the config has no limits.
        in_rows: whether each sequence gets a row of its own, because the architecture cannot pack sequences.
    """

    gradient: float
    others: float
    alone: float
    beyond: float
    failure: str | None = None
    limit: int | None = None
    in_rows: bool = False

    @property
    def sound_within(self) -> bool:
        """Whether packed sequences of up to `limit` tokens are computed correctly. False for NaN."""
        return self.gradient == 0 and self.others <= _OTHERS and self.alone <= _ALONE

    @property
    def sound(self) -> bool:
        """Whether packed sequences of any length are computed correctly."""
        return self.sound_within and self.failure is None and self.beyond <= _ALONE

    @property
    def lines(self) -> list[str]:
        """The results as sentences for the user."""
        beyond = self.failure or f"{self.beyond:.3g} (limit {_ALONE:g})"
        layout = "padded, each in a row of its own" if self.in_rows else "packed into one row"
        return [
            f"sequences in training: {layout}",
            f"gradient with respect to other sequences: {self.gradient:.3g} (limit 0)",
            f"change when other sequences change: {self.others:.3g} (limit {_OTHERS:g})",
            "in training, compared with transformers on each sequence alone: "
            f"{self.alone:.3g} (limit {_ALONE:g})",
            f"the same, beyond every window, chunk and angle limit: {beyond}",
        ]


def require_sound(found: PackedCheck, path: str | Path, longest: int) -> None:
    """Check that packed sequences of up to `longest` tokens are computed correctly.

    Args:
        found: the results of `check_packed`.
        path: the model's folder, for the message.
        longest: the number of tokens of the longest training sequence.

    Raises:
        ModelError: If packed sequences of that length are not computed correctly.
    """
    if found.sound or (found.sound_within and found.limit is not None and longest <= found.limit):
        return
    if found.sound_within and found.limit is not None:
        raise _unfit(
            "the model cannot be trained on packed sequences of this length",
            got=f"{path}: sequences of up to {longest} tokens; {found.lines[-1]}",
            expected=f"at most {found.limit} tokens, the smallest window, chunk or angle limit of the model",
            remedy="lower the maximum prompt or response length, or train another model",
        )
    raise _unfit(
        "the model computes packed sequences differently from single sequences",
        got=f"{path}: " + "; ".join(found.lines),
        remedy="train another model; another rollout engine does not help",
    )


def require_packed(packed: Tensor, alone: Tensor, limit: float, model: str) -> None:
    """Check that log-probs of packed sequences equal those of single sequences.

    The mean difference is compared with the limit, because in bf16 a single log-prob may differ by more.

    Raises:
        ModelError: If the mean difference is above the limit, or if log-probs are not finite. In the second
            case, packing is not the cause.
    """
    if not bool(alone.isfinite().all()):
        raise _unfit(
            "the model's log-probs are not finite, even for a sequence alone",
            got=f"{model}: NaN or infinite for {int((~alone.isfinite()).sum())} of {alone.numel()} tokens",
            expected="finite weights, and a type in which they do not overflow",
            remedy="look for NaN in the model's weights, and train another checkpoint of it",
        )
    difference = float((packed - alone).abs().mean())
    if not difference <= limit:
        raise _unfit(
            "the model computes packed sequences differently from single sequences",
            got=f"{model}: log-probs differ by {difference:.3g} nats on average",
            expected=f"at most {limit:g}",
            remedy="run `tandem check --model` for details, or train another model",
        )
