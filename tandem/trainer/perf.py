"""Measures of a step that workers took: counts, seconds, and rates made of them under the field's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem.observability.metrics import Metrics
from tandem.runtime import WorkerGroup
from tandem.trainer.steps import Plan


def take_observed(groups: Iterable[WorkerGroup]) -> Metrics:
    """The metrics that workers observed besides their results since the last call."""
    return Metrics.merged(part for group in groups for part in offered(group, "take_observed"))


def take_timings(groups: Iterable[WorkerGroup]) -> dict[str, float]:
    """`timing/PHASE`, seconds since the last call; of several ranks the slowest's."""
    seconds: dict[str, float] = {}
    for group in groups:
        for taken in offered(group, "take_timings"):
            seconds |= {name: max(value, seconds.get(name, 0.0)) for name, value in taken.items()}
    return seconds


def take_usage(groups: Iterable[WorkerGroup], elapsed_s: float) -> dict[str, float]:
    """The use of each role's processes since the last call: the share of the elapsed time that its ranks were
    busy, their seconds of waiting for inputs and of bringing them, all means over ranks, and the bytes
    brought."""
    out: dict[str, float] = {}
    for group in groups:
        taken = group.take_usage()
        ranks = len(taken)
        out[f"perf/busy_share/{group.role}"] = sum(u.busy_s for u in taken) / ranks / elapsed_s
        out[f"perf/wait_s/{group.role}"] = sum(u.wait_s for u in taken) / ranks
        out[f"perf/transfer_s/{group.role}"] = sum(u.transfer_s for u in taken) / ranks
        out[f"perf/transfer_bytes/{group.role}"] = float(sum(u.transfer_bytes for u in taken))
    return out


def offered(group: WorkerGroup, method: str, *arguments: Any) -> list[Any]:
    """What all workers of a group return of a method that not every worker class has."""
    call: Callable[..., list[Any]] | None = getattr(group, method, None)
    return [] if call is None else call(*arguments)


def throughput(
    seconds: Mapping[str, float], metrics: Mapping[str, float], plan: Plan, devices: Mapping[str, int]
) -> dict[str, float]:
    """Timings and rates. `_PHASES` has by phase the kind of its tokens, its rate's name, if it has one, and
    the role whose processes that is divided by.

    Args:
        seconds: `timing/PHASE` to seconds of one step.
        metrics: of the same step; `tokens/total` and `tokens/response` are read, and
            `sampling/response_tokens` where more was written than is learnt from.
        plan: of the run.
        devices: "actor" and "rollout" to the processes of each.
    """
    passes = {"update_actor": plan.actor.epochs, "update_critic": plan.critic.epochs}
    written = metrics.get("sampling/response_tokens", metrics["tokens/response"])
    counts = {"total": metrics["tokens/total"], "response": written}
    out = dict(seconds)
    for phase, (kind, name, role) in _PHASES.items():
        taken = seconds.get(f"timing/{phase}")
        if taken:
            tokens = counts[kind] * passes.get(phase, 1)
            out[f"timing_per_token_ms/{phase}"] = 1000 * taken / max(tokens, 1)
            if name:
                out[f"perf/{name}_tokens_per_s_per_device"] = tokens / taken / devices[role]
    out["perf/step_tokens_per_s"] = counts["total"] / seconds["timing/step"]
    return out


_PHASES = {
    "gen": ("response", "gen", "rollout"),
    "old_log_prob": ("total", "log_prob", "actor"),
    **dict.fromkeys(("ref", "values", "adv", "update_critic"), ("total", "", "")),
    "update_actor": ("total", "train", "actor"),
}
