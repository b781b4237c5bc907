"""Report the results of a replay, as JSON-like values for programs and as text for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import ModelError
from tandem.models.loading import load_tokenizer
from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tandem.trainer.takes import Changes, TakenStep, same
from tandem.workers.attribution import UpdateGradient, dot

Decode = Callable[[list[int]], str]
SHOWN = 8


def replay_found(
    run: Run,
    step: int,
    words: Sequence[str] = (),
    reward: str | None = None,
    without: Sequence[str] = (),
    *,
    attribute: bool = False,
) -> dict[str, Any]:
    """Replay a step and return the results as JSON-like values.

    Args:
        run: The run.
        step: The number of the step, from 1.
        words: `key=value` changes of the config; see `Changes`.
        reward: `file.py:function`, to use instead of the recorded scores.
        without: Samples to leave out, as the uid of a prompt or `uid#sample`.
        attribute: Whether to attribute the gradient to samples and tokens.

    Returns:
        `step`, `checkpoint`, `equal`, and `metrics` (rows of name, recorded, replayed, equal).
        If the step was changed, `changed` has `metrics` (name, before, after), `gradient` (cosine, and norm
        before and after, of the gradient summed over the step's updates), and `samples` (rows of uid, sample,
        score and mean advantage before and after, the largest change first).
        With attribution, `attribution` has `updates` (norm, sum of shares), `samples` (rows of uid, sample,
        share, tokens' shares, token ids, the largest share first), `seconds`, and `steps`: `seconds` as a
        number of training steps.
    """
    replayed = replay(run, step, Changes(words, reward, without), attribute=attribute)
    again = replayed.replayed.metrics
    metrics = [
        {"name": name, "recorded": value, "replayed": again[name], "equal": same(value, again[name])}
        for name, value in replayed.recorded.items()
    ]
    found: dict[str, Any] = {"step": replayed.step, "checkpoint": replayed.checkpoint}
    found |= {"equal": replayed.equal, "metrics": metrics}
    if replayed.base is not None and replayed.changed is not None:
        found["changed"] = _changed(replayed.base, replayed.changed, list(replayed.recorded))
    if replayed.base is not None and replayed.attributed:
        found["attribution"] = _attribution(replayed.base)
    return found


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities in nested lists and dicts by None, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decoder(run: Run) -> Decode:
    """Return a function that decodes the run's token ids, or shows the ids if the tokenizer is missing."""
    model = run.config["actor_rollout_ref"]["model"]
    try:
        tokenizer = load_tokenizer(model["tokenizer_path"] or model["path"])
    except ModelError:
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids))


def _changed(before: TakenStep, after: TakenStep, names: Sequence[str]) -> dict[str, Any]:
    metrics = [
        {"name": name, "before": before.metrics[name], "after": after.metrics[name]}
        for name in names
        if name in before.metrics and name in after.metrics
        if not same(before.metrics[name], after.metrics[name])
    ]
    a, b = _summed(before.gradients), _summed(after.gradients)
    norms = {"before": math.sqrt(dot(a, a)), "after": math.sqrt(dot(b, b))}
    both_norms = norms["before"] * norms["after"]
    cosine = dot(a, b) / both_norms if both_norms else math.nan
    was, now = _by_sample(before), _by_sample(after)
    rows: list[dict[str, Any]] = []
    for (uid, number), (score, advantage) in was.items():
        score_after, advantage_after = now.get((uid, number), (None, None))
        row = {"uid": uid, "sample": number, "score": score, "score_after": score_after}
        rows.append(row | {"advantage": advantage, "advantage_after": advantage_after})
    rows.sort(key=lambda row: -abs((row["advantage_after"] or 0.0) - row["advantage"]))
    return {"metrics": metrics, "gradient": {"cosine": cosine, **norms}, "samples": rows}


def _summed(gradients: Sequence[UpdateGradient]) -> dict[str, Any]:
    """Return the sum of the gradients of a step's updates. Each gradient is at its update's weights."""
    total = dict(gradients[0].gradient) if gradients else {}
    for more in gradients[1:]:
        total = {name: value + more.gradient[name] for name, value in total.items()}
    return total


def _by_sample(taken: TakenStep) -> dict[tuple[str, int], tuple[float, float]]:
    """Return a dict from (uid, sample number) to (score, mean advantage over the response)."""
    samples = taken.samples
    written = zip(samples.ragged("advantages"), samples.ragged("response_mask"), strict=True)
    means = [float(a[m].double().mean()) if bool(m.any()) else 0.0 for a, m in written]
    scores = samples.dense("scores").tolist()
    return dict(zip(taken.names, zip(scores, means, strict=True), strict=True))


def _attribution(taken: TakenStep) -> dict[str, Any]:
    """Return each sample's share of the gradient, averaged over the step's updates. The shares sum to one."""
    ids = dict(zip(taken.names, taken.samples.ragged("tokens"), strict=True))
    looked = [update for update in taken.gradients if update.shares]
    tokens: dict[tuple[str, int], Any] = {}
    for update in looked:
        for name, shares in zip(update.samples, update.shares, strict=True):
            tokens[name] = tokens.get(name, 0.0) + shares / len(looked)
    rows: list[dict[str, Any]] = []
    for (uid, number), shares in tokens.items():
        row = {"uid": uid, "sample": number, "share": float(shares.sum())}
        rows.append(row | {"tokens": shares.tolist(), "ids": ids[uid, number].tolist()})
    rows.sort(key=lambda row: -abs(row["share"]))
    seconds = sum(update.seconds for update in taken.gradients)
    updates = []
    for update in taken.gradients:
        total = float(sum(float(shares.sum()) for shares in update.shares))
        updates.append({"norm": update.norm, "sum": total, "seconds": update.seconds})
    step_s = taken.metrics["timing/step"] - seconds
    return {"updates": updates, "samples": rows, "seconds": seconds, "steps": seconds / step_s}


def text(found: dict[str, Any], decode: Decode) -> str:
    """Return the report as text.

    Args:
        found: A result of `replay_found`.
        decode: Decodes token ids to text.
    """
    rows = [
        [m["name"], f"{m['recorded']:.9g}", f"{m['replayed']:.9g}", "yes" if m["equal"] else "no"]
        for m in found["metrics"]
    ]
    equal = sum(m["equal"] for m in found["metrics"])
    lines = _table(["metric", "recorded", "replayed", "equal"], rows)
    begun = f"the checkpoint of step {found['checkpoint']}" if found["checkpoint"] else "the first model"
    lines += [f"step {found['step']}, from {begun}: {equal} of {len(rows)} metrics equal, bit for bit"]
    if "changed" in found:
        lines += ["", *_changed_text(found["changed"])]
    if "attribution" in found:
        lines += ["", *_attribution_text(found["attribution"], decode)]
    return "\n".join(lines)


def _changed_text(changed: dict[str, Any]) -> list[str]:
    rows = [[m["name"], f"{m['before']:.6g}", f"{m['after']:.6g}"] for m in changed["metrics"]]
    lines = _table(["changed metric", "before", "after"], rows)
    gradient = changed["gradient"]
    turned = f"cosine {gradient['cosine']:.6f} to the original gradient"
    if math.isnan(gradient["cosine"]):
        turned = "zero, so nothing is learned" if not gradient["after"] else "no longer zero"
    norms = f"norm {gradient['before']:.4g} → {gradient['after']:.4g}"
    lines += [f"gradient: {turned}, {norms} (sum over the step's updates, before clipping)", ""]
    columns = ("score", "score_after", "advantage", "advantage_after")
    cells = []
    for row in changed["samples"]:
        numbers = ["left out" if row[name] is None else f"{row[name]:.4g}" for name in columns]
        if (row["score"], row["advantage"]) != (row["score_after"], row["advantage_after"]):
            cells.append([f"{row['uid']}#{row['sample']}", *numbers])
    shown = cells[:SHOWN]
    lines += _table(["sample", "score", "after", "advantage", "after"], shown)
    return [*lines, f"{len(shown)} of {len(cells)} samples that differ"]


def _attribution_text(found: dict[str, Any], decode: Decode) -> list[str]:
    rows = []
    for row in found["samples"][:SHOWN]:
        best = sorted(range(len(row["tokens"])), key=lambda t: -abs(row["tokens"][t]))[:4]
        words = ", ".join(f"{decode([row['ids'][t]])!r} {row['tokens'][t]:+.3f}" for t in sorted(best))
        rows.append([f"{row['uid']}#{row['sample']}", f"{row['share']:+.4f}", words])
    sums = ", ".join(f"{update['sum']:.9f}" for update in found["updates"])
    return [
        *_table(["sample", "share", "tokens with the largest shares"], rows),
        f"shares of the unclipped gradient, not of the optimizer's step; their sum in each update: {sums}",
        f"attribution took {found['seconds']:.2f} s, as long as {found['steps']:.1f} steps of this replay",
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
