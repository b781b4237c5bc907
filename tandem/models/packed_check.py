"""A check that a model gives sequences packed into one row what it gives each of them alone.

A model that lets one sequence see another, or counts positions through, would train on wrong log-probs
without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ModelError
from tandem.models.architectures import require_packable
from tandem.models.loading import load_config, load_policy
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.protocol import Ragged

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The error that rounding may make in a log-prob, nats; a model that is wrong is off by tenths and more."""
_LENGTHS = (9, 1, 33, 2, 17)


@dataclass(frozen=True, slots=True)
class PackedCheck:
    """Largest differences of log-probs, nats.

    Attributes:
        alone: packed, against each sequence alone.
        reference: packed, against transformers' own attention with each sequence alone.
        limit: of both.
    """

    alone: float
    reference: float
    limit: float

    @property
    def sound(self) -> bool:
        """Not for NaN."""
        return self.alone <= self.limit and self.reference <= self.limit


def check_sequences(vocabulary: int) -> Ragged:
    """Sequences of different lengths to try a model with."""
    draw = torch.Generator().manual_seed(0)
    return Ragged.from_list([torch.randint(vocabulary, (length,), generator=draw) for length in _LENGTHS])


def check_packed(path: str | Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PackedCheck:
    """Tries the causal language model of a folder on the CPU.

    Raises:
        ModelError: it cannot be loaded, or is of a kind that cannot be packed.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    require_packable(path, config, trust_remote_code=trust_remote_code)
    model: Any = load_policy(path, dtype=dtype, trust_remote_code=trust_remote_code)
    model.eval()
    policy, tokens = PolicyModel(model), check_sequences(model.config.get_text_config().vocab_size)
    with torch.no_grad():
        packed = _log_probs(policy, tokens)
        alone = torch.cat([_log_probs(policy, Ragged.from_list([row])) for row in tokens])
        model.set_attn_implementation("sdpa")
        reference = torch.cat([_reference(model, row) for row in tokens])
    return PackedCheck(_gap(packed, alone), _gap(packed, reference), LIMITS[dtype])


def require_packed(packed: Tensor, alone: Tensor, limit: float, model: str) -> None:
    """
    Raises:
        ModelError: the two differ by more than the limit on average, where in bf16 a single one may; or they
            are not finite, which is no matter of packing.
    """
    if not bool(alone.isfinite().all()):
        raise ModelError(
            "the model's log-probs are not finite, of a sequence alone as of packed ones",
            field="model.path",
            got=f"{model}: NaN or infinite for {int((~alone.isfinite()).sum())} of {alone.numel()} tokens",
            expected="finite weights, and a type in which they do not overflow",
            remedy="look for NaN among the model's weights; train another checkpoint of it",
        )
    difference = float((packed - alone).abs().mean())
    if not difference <= limit:
        raise ModelError(
            "the model does not give packed sequences what it gives each of them alone",
            field="model.path",
            got=f"{model}: log-probs differ by {difference:.3g} nats on average",
            expected=f"at most {limit:g}",
            remedy="`tandem check --model` shows more; train another model",
        )


def _log_probs(policy: PolicyModel, tokens: Ragged) -> Tensor:
    inputs = pack(tokens, None, device=torch.device("cpu"))
    out: Tensor = policy(inputs, frozenset({"log_probs"}))["log_probs"]
    return out


def _reference(model: Any, row: Tensor) -> Tensor:
    """The log-prob of each token given those before it, the first 0."""
    logits = model(input_ids=row[None, :], use_cache=False).logits[0, :-1]
    log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    found = log_probs.gather(-1, row[1:, None]).squeeze(-1)
    return torch.cat([found.new_zeros(1), found])


def _gap(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())
