"""Functions that compute the gradient of a policy update and the share of each sample and token in it.

The gradient is computed in float64 with transformers' forward pass. It is the reference for tests of the
training engine, and replays of a run inspect it.

Let g be the unclipped gradient of an update's loss L. L is a sum over samples. Each sample's term is a
function of the sample's outputs o: the log-probs and entropies of its tokens. The share of token t is
⟨∂L/∂o_t · ∂o_t/∂θ, g⟩ / |g|². The shares of all tokens add up to one. A sample's share is the sum of its
tokens' shares. ∂o/∂θ · g is one forward-mode product. Adam changes the direction of g, so the shares describe
the gradient and not the change of the weights.

Shapes: T tokens of a sample.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tandem.config.root import TrainConfig
from tandem.engines.train.base import Counts, RecountingLoss, TrainEngine
from tandem.models.loading import load_config
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.runtime import Dispatch, register
from tandem.workers.actor import ActorWorker
from tandem.workers.actor_part import ActorPart
from tandem.workers.base import EngineWorker
from tandem.workers.losses import ActorLoss

OUTPUTS = ("log_probs", "entropy")
"""The names of the model outputs that `Reference` computes."""
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class UpdateGradient:
    """The gradient of one policy update, and the share of each token in it.

    Attributes:
        gradient: The gradient of each parameter, float64.
        norm: The norm of the gradient.
        samples: (B) The uid and the sample number of each sample of the mini-batch.
        shares: (B) For each sample, the shares of its tokens (T), float64. Empty if shares were not
            requested.
        seconds: The duration of the computation.
    """

    gradient: Weights
    norm: float
    samples: list[tuple[str, int]]
    shares: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


class Reference:
    """A policy whose outputs are computed in float64, one sample at a time.

    Args:
        path: The path of the model, for its architecture.
        weights: A dict from Hugging Face name to weight.
        temperature: The temperature, which divides the logits.
        options: Further options for loading the model's config.
    """

    def __init__(self, path: str, weights: Mapping[str, Tensor], temperature: float, **options: Any) -> None:
        config = load_config(path, **options)
        self._model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation="eager", dtype=torch.float64, **options
        )
        left = self._model.load_state_dict(dict(weights), strict=False)
        tied = {name for name, _ in self._model.named_parameters()}
        assert not (set(left.missing_keys) & tied or left.unexpected_keys), left
        self._temperature = temperature
        self.parameters = {name: value.detach() for name, value in self._model.named_parameters()}

    def outputs(self, parameters: Weights, ids_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs (T) and the entropies (T) in nats. They are zero outside the mask."""
        given = (ids_T[None], torch.ones_like(ids_T)[None])
        logits = torch.func.functional_call(self._model, parameters, given, {"use_cache": False}).logits[0]
        log_probs_TV = torch.log_softmax(logits[:-1] / self._temperature, -1)
        chosen = log_probs_TV.gather(-1, ids_T[1:, None])[:, 0]
        entropy = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
        mask = mask_T[1:]
        return tuple(nn.functional.pad(torch.where(mask, o, 0), (1, 0)) for o in (chosen, entropy))  # type: ignore[return-value]


def attribute(reference: Reference, batch: DataProto, loss: ActorLoss, *, shares: bool) -> UpdateGradient:
    """Return the gradient of an update's loss, and optionally the shares of the tokens.

    Args:
        reference: The policy.
        batch: The mini-batch, with the columns that the loss reads.
        loss: The loss.
        shares: Whether to compute the shares, which needs one forward-mode product per sample.
    """
    began = time.perf_counter()
    loss = replace(loss, compared=frozenset())
    tokens, masks = list(batch.ragged("tokens")), list(batch.ragged("response_mask"))
    counts = Counts(tokens=sum(int(m.sum()) for m in masks), sequences=sum(bool(m.any()) for m in masks))
    parameters = {name: value.clone().requires_grad_() for name, value in reference.parameters.items()}
    metrics, outward = [], []
    for row in range(len(batch)):
        ids_T, columns = tokens[row], _columns(batch, loss, row)
        out = reference.outputs(parameters, ids_T, masks[row])
        held = [o.detach().requires_grad_() for o in out]
        named, offsets = dict(zip(OUTPUTS, held, strict=True)), torch.tensor([0, len(ids_T)])
        value, observed = loss(named, columns, offsets, counts)
        metrics.append(observed)
        found = torch.autograd.grad(value, held, allow_unused=True) if value.requires_grad else (None, None)
        outward.append([torch.zeros_like(o) if d is None else d for o, d in zip(out, found, strict=True)])
        if bool(masks[row].any()):
            torch.autograd.backward(out, outward[-1])
    factor = loss.recount(Metrics.merged(metrics), counts) if isinstance(loss, RecountingLoss) else 1.0
    gradient = {
        name: torch.zeros_like(p) if p.grad is None else factor * p.grad for name, p in parameters.items()
    }
    squared = dot(gradient, gradient)
    split = []
    for row in range(len(batch) if shares and squared > 0 else 0):
        outputs = partial(reference.outputs, ids_T=tokens[row], mask_T=masks[row])
        moved = torch.func.jvp(outputs, (reference.parameters,), (gradient,))[1]  # ∂o/∂θ · g
        terms = [d * m for d, m in zip(outward[row], moved, strict=True)]
        split.append(factor * sum(terms[1:], terms[0]) / squared)
    names = batch.non_tensor_batch
    samples = list(zip(names["uid"].tolist(), names["sample"].tolist(), strict=True))
    return UpdateGradient(gradient, squared**0.5, samples, split, time.perf_counter() - began)


def _columns(batch: DataProto, loss: ActorLoss, row: int) -> dict[str, Tensor]:
    found = {}
    for name, column in batch[[row]].select(sorted(loss.columns), ()).batch.items():
        value = column.values if isinstance(column, Ragged) else column
        found[name] = value.double() if value.is_floating_point() else value
    return found


def dot(a: Weights, b: Weights) -> float:
    """Return the inner product of two gradients."""
    return sum(float((a[name] * b[name]).sum()) for name in a)


class WatchedActorPart(ActorPart):
    """An actor part that also computes and stores the gradient of each update.

    Attributes:
        found: The gradients of all updates since the last call of `take_gradients`.
        shares: Whether to compute the shares of samples and tokens.
    """

    def __init__(self, config: TrainConfig, engine: TrainEngine, **options: Any) -> None:
        super().__init__(config, engine, **options)
        self._model = config.actor_rollout_ref.model
        self.found: list[UpdateGradient] = []
        self.shares = False

    def step_on(self, worker: EngineWorker, batch: DataProto, loss: ActorLoss, *, rejects: bool) -> Metrics:
        """Take the optimizer step. If the loss keeps at least one token, compute the gradient first."""
        if bool(batch.ragged("response_mask").values.any()):
            weights = dict(self.engine.weights(dtype=torch.float64))
            options = {"trust_remote_code": self._model.trust_remote_code}
            reference = Reference(self._model.path, weights, self._rollout.temperature, **options)
            self.found.append(attribute(reference, batch, loss, shares=self.shares))
        return super().step_on(worker, batch, loss, rejects=rejects)


class WatchedActor(ActorWorker):
    """An actor worker for a single process that stores the gradient of each update."""

    actor_part = WatchedActorPart

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def take_apart(self) -> None:
        """Compute the shares of samples and tokens for all later updates."""
        self.parts["actor"].shares = True

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def take_gradients(self) -> list[UpdateGradient]:
        """Return the gradients of all updates since the last call."""
        part = self.parts["actor"]
        found, part.found = part.found, []
        return list(found)
