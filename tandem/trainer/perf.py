"""Collect the workers' counts and timings of a step, and compute rates from these numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem.observability.metrics import Metrics
from tandem.runtime import WorkerGroup
from tandem.trainer.steps import Plan


def take_observed(groups: Iterable[WorkerGroup]) -> Metrics:
    """Return the metrics that workers recorded on the side (not in their results) since the last call."""
    return Metrics.merged(part for group in groups for part in offered(group, "take_observed"))


def take_timings(groups: Iterable[WorkerGroup]) -> dict[str, float]:
    """Return `timing/PHASE` since the last call, in seconds, for the slowest rank of each phase."""
    seconds: dict[str, float] = {}
    for group in groups:
        for taken in offered(group, "take_timings"):
            seconds |= {name: max(value, seconds.get(name, 0.0)) for name, value in taken.items()}
    return seconds


def take_usage(groups: Iterable[WorkerGroup], elapsed_s: float) -> dict[str, float]:
    """Return the utilization of each role's processes since the last call.

    The values are: the fraction of the elapsed time in which ranks were busy, the seconds that ranks waited
    for inputs, the seconds of transferring inputs (all three as means over ranks), and the bytes transferred
    (summed over ranks).

    Args:
        groups: The worker groups.
        elapsed_s: The seconds since the last call.
    """
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
    """Call a method on all workers of a group; return [] if the worker class does not have the method."""
    call: Callable[..., list[Any]] | None = getattr(group, method, None)
    return [] if call is None else call(*arguments)


def throughput(
    seconds: Mapping[str, float], metrics: Mapping[str, float], plan: Plan, devices: Mapping[str, int]
) -> dict[str, float]:
    """Return the timings and the rates of a step.

    Args:
        seconds: `timing/PHASE` of one step, in seconds.
        metrics: The metrics of the same step. `tokens/total` and `tokens/response` are read, and
            `sampling/response_tokens` if more responses were generated than training uses.
        plan: The plan of the run.
        devices: The number of processes of "actor" and of "rollout".
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
"""For each phase: the tokens that count, the rate's name or "", and the role for the rate per process."""
