from statistics import median
from typing import Any

from tests.support.shown import MEASURED, Shown, one, span, word

MEMORY, PROBE = "docs/memory.md", "docs/before-a-run.md"


def plan_memory(file: Any) -> Shown:
    def group(name: str) -> str:
        first = {"held": "held out", "mixture": "mixtures"}.get(name.partition(" ")[0])
        return first or ("windows" if ", window" in name else "designed")

    def errors(kind: str, phase: str, part: str) -> list[float]:
        rows = (row for name, row in file["rows"].items() if group(name) == kind)
        return [abs(row["errors"][phase][part]) for row in rows]

    def totals(kind: str, phase: str) -> tuple[str, str]:
        known = errors(kind, phase, "total")
        return f"{median(known):.2%}", f"{max(known):.2%}"

    phases, kinds = ("log_prob", "update"), ("designed", "windows", "mixtures", "held out")
    count = [len(errors(kind, "update", "total")) for kind in kinds]
    for kind, number in zip(kinds, count, strict=True):
        cells = [", ".join(totals(kind, phase)) for phase in phases]
        for part in ("gathered", "rest"):
            cells.append(", ".join(f"{max(errors(kind, phase, part)):.0%}" for phase in phases))
        yield MEMORY, f"| {kind} | {number} | {' | '.join(cells)} |"
    parts = [row["errors"][phase] for row in file["rows"].values() for phase in phases]
    off = sum(max(abs(part["gathered"]), abs(part["rest"])) > 0.1 for part in parts)
    yield MEMORY, f"Of the {len(parts)} passes {off} have a part that is off by more than a tenth"
    state = max(abs(part[kind]) for part in parts for kind in ("weights", "optimizer"))
    yield MEMORY, f"Weights and optimizer state are exact to {state:.1%}"
    drawn = sum(name.startswith("drawn,") and group(name) == "designed" for name in file["rows"])
    again = sum(name.startswith("drawn") for name in file["rows"]) - drawn
    shapes = "configurations of 0.5B to 72B shapes, with memory settings on and off"
    yield MEMORY, f"{count[0]} {shapes}, {count[1]} with windows, {count[2]} mixtures, and {count[3]}"
    yield MEMORY, f"these {again} are among the {count[1]}"
    yield MEMORY, f"these {drawn} are among the {count[0]}"
    most = max(abs(part["total"]) for part in parts)
    yield "README.md", f"within {most:.1%} of traces of the model's own operations"
    (a, b), (c, d) = (totals(kind, "update") for kind in kinds[::3])
    designed = f"{a} (median) and {b} (worst) in {count[0]} designed configurations"
    yield MEASURED, f"total of the update is off by {designed}, {c} and {d} in {count[3]} held-out ones"
    (a, b), (c, d) = (totals(kind, "log_prob") for kind in kinds[::3])
    yield MEASURED, f"total of the log-prob pass is off by {a} and {b}, {c} and {d}"
    ranks = span((row["case"]["shards"] * row["case"]["tensor"] for row in file["rows"].values()), "")
    yield MEASURED, f"0.5B to 72B, {ranks} ranks"
    large, small = "Llama-3-70B 3 layers, 8192 tokens mode={} shards=64", "Qwen2.5-0.5B 4 layers, 4096 tokens"

    def traced(name: str) -> float:
        return float(file["rows"][name]["traced"]["update"]["total"]) / 2**30

    kept, again = (traced(large.format(mode)) for mode in ("none", "full"))
    yield MEMORY, f"one of 64 devices: {kept:.1f} GiB without recomputation, {again:.1f} with everything"
    none, ops, full = (traced(f"{small} shards=8 mode={mode}") for mode in ("none", "ops", "full"))
    yield MEMORY, f"on one of 8, 4,096 tokens: {none:.2f}, `ops` {ops:.2f}, `full` {full:.2f}"


def plan_resident(file: Any) -> Shown:
    log_probs, updates = (
        span((100 * row["errors"][phase] for row in file["rows"]), "+.1f") for phase in ("log_prob", "update")
    )
    yield MEMORY, f"off by {log_probs}% in the log-prob pass and by {updates}% in the update"


def plan_time(file: Any) -> Shown:
    fitted, held = file["fitted"], file["held out"]
    sizes = span((int(row["run"][0].removesuffix("M")) for row in file["rows"]), "")
    estimators = len({row["run"][1] for row in file["rows"] if row["set"] == "held out"})
    name = "docs/bench.md"
    yield name, f"factors of {fitted['runs']} runs predict the step of {held['runs']} others"
    yield name, f"of models from {sizes} million parameters in fp32"
    yield name, f"{word(estimators)} estimators with and without a critic"
    yield name, f"off by {held['median']:.1%} in the median and {held['worst']:.1%} at worst; for the"
    errors = f"{fitted['median']:.1%} and {fitted['worst']:.1%}"
    yield name, f"{fitted['runs']} runs that were fitted, the errors are {errors}"
    yield name, f"(load {file['load']['least']:.2f} to {file['load']['most']:.2f})"


def plan_probe(file: Any) -> Shown:
    rows = file["rows"]
    tasks, _, answers, heat = (set(values) for values in zip(*(row["run"] for row in rows), strict=True))
    yield PROBE, f"over {file['truth_groups']:,} groups of another seed, for {word(len(rows))} runs"
    yield PROBE, f"{word(len(tasks))} of the demo's tasks"
    least, most = word(min(answers)), word(max(answers))
    yield PROBE, f"{least} to {most} responses, temperatures from {span(heat, 'g')}"
    truths = sorted(row["truth"] for row in rows)
    missed = one(rows, inside=False)
    low, high = (missed["without_spread"][end] for end in ("low", "high"))
    yield PROBE, f"of shares from {truths[0]:.0%} to {truths[-1]:.0%}"
    yield PROBE, f"the tenth said {low:.0%} to {high:.0%}, and it was {missed['truth']:.0%}"
    wide = span((100 * (row["without_spread"]["high"] - row["without_spread"]["low"]) for row in rows), ".0f")
    yield PROBE, f"With {rows[0]['groups']} prompts an interval is {wide} points wide"


PLANS = (plan_memory, plan_resident, plan_time, plan_probe)
