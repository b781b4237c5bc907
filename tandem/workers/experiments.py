"""Experiments that find the reason why the log-probs of rollout and training differ.

The training engine's forward pass is repeated, each time with one change that imitates a known fault. If the
difference disappears under a change, the corresponding fault is the cause.

Shapes: T tokens of all samples, flat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.engines.train.base import MicroBatching, TrainEngine
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.watch.gap import AS_IT_IS, EXPERIMENT, compared, gap_columns


def add_experiments(
    metrics: Metrics, engine: TrainEngine, batch: DataProto, *, adapters: bool, temperature: float
) -> None:
    """Add mean |log p - log q| over response tokens to the metrics, with each fault and without.

    p is the training engine's probability of a token, and q is the rollout's. The unit is nats. Collective.

    - `again`: the difference between two forward passes that should be equal.
    - `alone`: each sample in a separate forward pass.
    - `without_adapters`: with the base model, if adapters are trained.
    - `unscaled`: with temperature 1.
    - `headless`: with samples that lack their first token.
    - `early`, `late`: with q shifted by one token.

    Args:
        metrics: The metrics to which the results are added.
        engine: The training engine.
        batch: A few samples of this rank, with `rollout_log_probs`.
        adapters: Whether adapters are trained.
        temperature: The temperature of training.
    """

    def log_probs(of: DataProto = batch, **how: Any) -> Ragged:
        given, how = of.select(["tokens", "response_mask"], ()), {"micro": MicroBatching()} | how
        return engine.forward(given, outputs=frozenset({"log_probs"}), **how).ragged("log_probs")

    mask = batch.ragged("response_mask")
    sampled_T = compared({name: batch.ragged(name).values for name in gap_columns(batch)})
    as_it_is = log_probs()
    found = {AS_IT_IS: as_it_is.values, "alone": log_probs(micro=MicroBatching(max_samples=1)).values}
    if adapters:
        found["without_adapters"] = log_probs(adapter=False).values
    if temperature != 1:
        found["unscaled"] = log_probs(temperature=1.0).values
    for name, p_T in found.items():
        _add(metrics, name, p_T - sampled_T, mask.values)
    _add(metrics, "again", log_probs().values - as_it_is.values, mask.values)
    kept_T, lengths_B = mask.positions() > 0, (mask.lengths - 1).clamp(min=0)
    kept = {name: batch.ragged(name).values[kept_T] for name in ("tokens", "response_mask")}
    headless = DataProto({name: Ragged.from_lengths(value, lengths_B) for name, value in kept.items()})
    _add(metrics, "headless", log_probs(headless).values - sampled_T[kept_T], mask.values[kept_T])
    for name, places in {"early": 1, "late": -1}.items():
        both_T = mask.values & mask.values.roll(-places)
        _add(metrics, name, as_it_is.values.roll(-places) - sampled_T, both_T)


def _add(metrics: Metrics, name: str, gap_T: Tensor, mask_T: Tensor) -> None:
    metrics.add_mean(
        f"{EXPERIMENT}{name}", torch.where(mask_T, gap_T, 0.0).double().abs().sum(), mask_T.sum()
    )
