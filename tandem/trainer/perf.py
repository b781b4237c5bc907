"""Seconds and tokens of a step as rates, under the field's names."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.trainer.steps import Plan


def throughput(
    seconds: Mapping[str, float], metrics: Mapping[str, float], plan: Plan, devices: Mapping[str, int]
) -> dict[str, float]:
    """Timings and rates.

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
    for phase, kind in _TOKENS_OF_PHASE.items():
        taken = seconds.get(f"timing/{phase}")
        if taken:
            tokens = counts[kind] * passes.get(phase, 1)
            out[f"timing_per_token_ms/{phase}"] = 1000 * taken / max(tokens, 1)
            if phase in _RATES:
                name, role = _RATES[phase]
                out[f"perf/{name}_tokens_per_s_per_device"] = tokens / taken / devices[role]
    out["perf/step_tokens_per_s"] = counts["total"] / seconds["timing/step"]
    return out


_RATES = {
    "gen": ("gen", "rollout"),
    "old_log_prob": ("log_prob", "actor"),
    "update_actor": ("train", "actor"),
}
"""Phase to the rate's name and the role whose processes it is divided by."""
_TOKENS_OF_PHASE = {
    "gen": "response",
    "old_log_prob": "total",
    "ref": "total",
    "values": "total",
    "adv": "total",
    "update_critic": "total",
    "update_actor": "total",
}
