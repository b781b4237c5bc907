"""Tests that the figures on pages equal the numbers in benchmarks/results.

Each file has a function of the same name. From the numbers in the file it builds phrases of a page, or of
docs/measurements.md if it names none. If a page names the file in a comment after the figure
(`docs/figures.py`), `test_site.py` checks the figure.
"""

import json
from itertools import groupby
from operator import itemgetter
from statistics import mean, median
from typing import Any

import pytest

from docs.blocks import blocks
from tandem.bench.report import markdown
from tandem.cli.main import main
from tests.support.shown import MEASURED, RESULTS, ROOT, Shown, one, page, plain, span, times_in, word
from tests.support.shown_plans import PLANS


def rollout_vs_vllm(file: Any) -> Shown:
    def row(size: str, dtype: str, work: str = "64x1") -> Any:
        return one(file["results"], size=size, dtype=dtype, workload=work)

    def both(size: str, dtype: str) -> str:
        over = row(size, dtype)["tandem_over"]
        return f"{over['vllm']:.1f} and {over['hf']:.1f}"

    sizes = ("3.2M", "30M", "107M")
    small, middle, large = (both(size, "bf16") for size in sizes)
    yield f"in bf16 {small} at 3.2M parameters, {middle} at 30M, {large} at 107M"
    yield f"in fp32 {', '.join(both(size, 'fp32') for size in sizes)}"
    many = ", ".join(f"{row(size, 'bf16', '256x8')['tandem_over']['vllm']:.1f} at {size}" for size in sizes)
    yield f"256 prompts with 8 samples each, bf16, over vLLM: {many}"

    def floors(*which: str) -> list[str]:
        return [f"{row(size, *which)['share_of_floor']['tandem']['ramp']:.2f}" for size in sizes]

    first, second, third = floors("bf16", "256x8")
    yield (
        f"bf16 {', '.join(floors('bf16'))}, fp32 {', '.join(floors('fp32'))};"
        f" with 256 prompts {first}, {second} and {third}"
    )


def rollout_vs_sglang(file: Any) -> Shown:
    [row] = file["results"]
    native, vllm, sglang = (f"{row['tokens_per_s'][name]:,.0f}" for name in ("tandem", "vllm", "sglang"))
    yield f"{native} of the native engine, {vllm} of vLLM 0.32, {sglang} of SGLang {file['peer']['sglang']}"


def grpo_step_vs_trl(file: Any) -> Shown:
    fp32, bf16, spread, spread_bf16 = (
        f"{one(file['rows'], mode=mode, precision=precision)['ratio']:.2f}"
        for mode in ("equal", "spread")
        for precision in ("fp32", "bf16")
    )
    yield f"Responses of 64 tokens: {fp32} in fp32, {bf16} in bf16"
    yield f"Lengths from 4 to 64: {spread} and {spread_bf16}"


def gpu_decode(file: Any) -> Shown:
    def row(name: str) -> tuple[str, str]:
        found = one(file["rows"], name=name)
        return f"{found['value']:,.0f}", f"{found['share']:.0%}"

    short, share = row("1.5B, batch 256, context 1024")
    yield f"takes 5.7 ms with 1.5 billion parameters: {short} tokens/s, {share} of"
    yield "At a context of 7,680 it is {} tokens/s and {}".format(*row("1.5B, batch 256, context 7680"))
    yield "a context of 1,024 tokens, it is {} and {} (".format(*row("7B, batch 256, context 1024"))


def gpu_step(file: Any) -> Shown:
    name = "64 samples of 3564 tokens"
    phases = ("generation", "previous log-probs", "training")
    rows = [one(file["rows"], name=f"{phase}, {name}") for phase in phases]
    rates, shares = [f"{row['value']:,.0f}" for row in rows], [f"{row['share']:.0%}" for row in rows]
    metrics = one(file["rows"], name=f"whole step, {name}")["metrics"]
    seconds = f"takes {metrics['timing/step']:.0f} s: {rates[0]} tokens/s of generation"
    yield f"{seconds}, {rates[1]} of log-probs and {rates[2]} of training"
    yield f"which are {shares[0]}, {shares[1]} and {shares[2]} of their bounds"
    yield "{:.1f}, {:.1f} and {:.1f} times what the users' table".format(*(r["times_verl"] for r in rows))
    update, log_probs = (
        metrics[f"perf/memory_predicted_bytes/{phase}"] / metrics[f"perf/memory_peak_bytes/{phase}"] - 1
        for phase in ("update_actor", "old_log_prob")
    )
    yield (
        f"is {update:.0%} more than the memory that was used. For the log-probs it is {-log_probs:.1%} less"
    )


def dispatch(file: Any) -> Shown:
    rows = {row["what"]: row for row in file["rows"]}

    def ratios(what: str) -> str:
        return f"{rows[what]['ratio']:.1f} ({rows[what]['ratio_to_fastest']:.1f})"

    def calls(what: str, key: str, scale: float = 1.0) -> str:
        return span((row[key] * scale for name, row in rows.items() if name.startswith(what)), ".1f")

    yield f"1 GiB from 2 workers to 3 workers: {ratios('1 GiB from 2 to 3 workers')}"
    yield f"0.5 GiB, reordered on the way: {ratios('0.5 GiB from 2 to 3 workers, reordered')}"
    kinds = ("concat", "chunk", "reorder", "union")
    yield ", ".join(f"{what} {rows[what]['ratio']:.1f}" for what in kinds)
    small, nothing = "a call with a small batch", "a call that does nothing"
    yield f"{small.capitalize()}: {calls(small, 'ratio')} ({calls(small, 'ratio_to_fastest')})"
    seconds = calls(nothing, "tandem_s", 1000)
    yield (
        f"{nothing.capitalize()}: {calls(nothing, 'ratio')} (Tandem takes {seconds} ms with 1 to 8 workers)"
    )


def controller_traffic(file: Any) -> Shown:
    first, second, third = (f"{row['samples']:,}" for row in file["traffic"])
    index = span((row["index_bytes_per_sample"] for row in file["traffic"]), ".0f")
    held = file["memory"]
    growth = held["growth_bytes_per_step"]["controller"] / 1000
    yield f"With batches of {first}, {second} and {third} samples"
    yield f"the controller receives only {index} bytes per sample"
    yield f"Over {held['steps']} steps its memory grew by {growth:.1f} KB a step"
    yield "docs/concepts/controller.md", f"ids and lengths, {index} bytes a sample"


def log_prob_head(file: Any) -> Shown:
    sizes, sides = file["sizes"], file["sides"]
    tokens, words = f"{sizes['tokens']:,} tokens", f"{sizes['vocabulary']:,}"
    own = f"{sides['tandem']['extra_bytes'] / 1e6:.0f} MB"
    full, verl = (f"{sides[side]['extra_bytes'] / 1e9:.1f} GB" for side in ("full", "verl"))
    half, less = (f"{sides['tandem']['seconds'] / sides[side]['seconds']:.2f}" for side in ("full", "verl"))
    yield f"of {tokens} over a vocabulary of {words} in bf16"
    yield (
        f"{own} in addition to the weight's gradient. With all logits at once it is {full}, and with"
        f" verl 0.9.1's chunked head {verl}. Tandem takes {half} and {less} of their time"
    )
    yield "docs/questions/systems.md", f"for {tokens} over {words} words {own} against {full}"
    yield "docs/performance.md", f"a vocabulary of {words} are computed in tiles"
    yield "docs/performance.md", f"For {tokens} in bf16"


def packing(file: Any) -> Shown:
    over = {row["dtype"]: row["packed_over"] for row in file["packing"]}
    bf16, fp32 = (f"{over[dtype]['rectangle']:.1f} times ({dtype})" for dtype in ("bf16", "fp32"))
    (sorted_lengths,) = {f"{row['padded']:.1f}" for row in over.values()}
    yield f"packed: {bf16} and {fp32} the tokens per second"
    yield f"{sorted_lengths} times those of rectangles of sorted lengths"
    ranks = span((row["ranks"] for row in file["balancing"]), "")
    before = span((row["ranks_before"] for row in file["balancing"]), ".2f")
    (after,) = {f"{row['ranks_after']:.2f}" for row in file["balancing"]}
    yield f"busiest of {ranks} ranks, divided by the mean: {before} before balancing, {after} after"


def update_vs_trl(file: Any) -> Shown:
    def both(size: str, mode: str, dtype: str = "bf16") -> str:
        over = one(file["rows"], size=size, dtype=dtype, mode=mode)["tandem_over"]["seconds"]
        return f"{over['trl']:.2f} ({over['transformers']:.2f}"

    small, large = both("3.2M", "equal"), both("107M", "equal")
    yield f"In bf16 with equal lengths: {small}) at 3.2M parameters and {large}) at 107M"
    spread = f"{both('3.2M', 'spread')}) and {both('107M', 'spread')})"
    yield f"with lengths from a sixteenth of the longest: {spread}"
    yield f"In fp32 with equal lengths at 3.2M: {both('3.2M', 'equal', 'fp32')}, because"


def levers(file: Any) -> Shown:
    done = {row["name"]: row for row in file["rows"] if "skipped" not in row}
    pairs = sum(" + " in name for name in done)
    exact, single = (
        f"{max(row['differences'].get(kind, 0.0) for row in done.values()):.1e}".replace("e-0", "e-")
        for kind in ("fp64", "fp32")
    )
    yield f"{len(done) - pairs - 1} settings of the training engine and {pairs} pairs of them"
    yield f"by at most {exact} in float64 and {single} in fp32"
    allowed = float(file["bounds"]["bf16"].split()[0])
    yield f"a difference of up to {allowed:.0f} times the distance between bf16 and float64 is allowed"
    less, slower = (
        done["recompute full"][key] / done["plain"][key] for key in ("peak_bytes", "tokens_per_s")
    )
    yield f"Recomputing all layers reduces the peak to {less:.0%} and the speed to {slower:.2f}"
    yield "docs/performance.md", f"a small model, {done['plain']['tokens']:,} tokens"


def advantages(file: Any) -> Shown:
    def ratio(name: str, samples: int, tokens: int, holes: float = 0.0) -> float:
        return float(one(file["rows"], name=name, samples=samples, tokens=tokens, holes=holes)["ratio"])

    long, many = ratio("gae", 64, 32768), ratio("gae", 256, 8192)
    yield f"GAE at (64, 32768) {long:.0f}, at (256, 8192) {many:.0f}"
    long, many = ratio("gae", 64, 32768, 0.1), ratio("gae", 256, 8192, 0.1)
    yield f"if a tool wrote a tenth of the tokens, {long:.0f} and {many:.1f}"
    loops = ["gdpo", "rloo", "gpg", "grpo", "opo", "reinforce_plus_plus_baseline", "grpo_passk"]
    names = ("GDPO", "RLOO", "GPG", "GRPO", "OPO", "REINFORCE++ with baseline", "pass@k")
    short = [f"{name} {ratio(key, 4096, 64):.0f}" for name, key in zip(names, loops, strict=True)]
    yield f"4,096 samples of 64 tokens, compared with verl's loops: {', '.join(short)}"
    *few, baseline, last = (ratio(key, 4096, 1024) for key in loops)
    shown = ", ".join(f"{value:.0f}" for value in few)
    yield f"of 1,024 tokens: {shown}, {baseline:.1f} and {last:.0f}"
    vectorised = span((row["ratio"] for row in file["rows"] if "vectorized" in row["name"]), ".3g")
    low, high = (float(value) for value in vectorised.split(" to "))
    remax = span((row["ratio"] for row in file["rows"] if row["name"] == "remax"), ".1f")
    plus = ratio("reinforce_plus_plus", 256, 8192)
    yield f"REINFORCE++ {plus:.0f}, GRPO and RLOO {low:.1f} to {high:.0f}, ReMax {remax}"
    best, tool = (ratio(f"{name}optimal_token_baseline", 4096, 64) for name in ("", "tir_"))
    yield f"Optimal token baselines {best:.1f} and {tool:.0f}"
    grown: dict[bool, float] = {}
    for row in file["rows"]:
        optimal = "optimal" in row["name"]
        grown[optimal] = max(grown.get(optimal, 0.0), row["tandem"]["extra_bytes"] / row["input_bytes"])
    yield f"at most {grown[False]:.1f} times the input, and by {grown[True]:.0f} times for optimal"


def learning_curves(file: Any) -> Shown:
    pairs, seconds = file["pairs"], f"{file['seconds']:.0f} s"
    reached, least = file["reached"], min(pair["reached"] for pair in pairs)
    (seeds,) = {len(pair["finals"]) for pair in pairs}
    yield f"{reached} of {len(pairs)} algorithms reach accuracy {file['goal']} in at least"
    yield f"in at least {word(least)} of {word(seeds)} seeds within {seconds} of training steps"
    yield "docs/choosing.md", f"over {seconds} of training steps, {word(seeds)} seeds each"
    for pair in pairs:
        finals = " ".join(f"{final:.3f}" for final in pair["finals"])
        cells = (pair["estimator"], pair["loss"], finals, f"{mean(pair['finals']):.3f}")
        row = f"| {' | '.join(cells)} | {pair['reached']} of {seeds} |"
        yield "benchmarks/results/learning_curves.md", row


def learning_warnings(file: Any) -> Shown:
    warned = sum(bool(run["warnings"]) for run in file["runs"])
    yield f"Of {len(file['runs'])} runs that learn, {word(warned)} gets a warning"


def data_rows(file: Any) -> Shown:
    cold, warm, ratio = file["medians"]["tandem cold"], file["medians"]["tandem warm"], file["ratio"]
    yield (
        f"with {word(file['workers'])} processes: {cold['seconds']:.1f} s and {cold['peak_gib']:.2f} GiB,"
        f" {ratio['cold']:.2f} times the time of `datasets`"
    )
    yield f"{warm['seconds']:.2f} s from the cache, {ratio['warm']:.2f} times"


def viewer(file: Any) -> Shown:
    own = {name: f"{value:.0f} ms" for name, value in file["page"].items()}
    paint, chart, choice, search = (own[f"{key}_ms"] for key in ("first_paint", "charts", "filter", "search"))
    slower, slow = (f"{1 / file['over_duckdb'][key]:.1f}" for key in ("filter_ms", "search_ms"))
    steps, samples = f"{file['steps']:,}", f"{file['samples'] // file['steps']:,}"
    yield f"A run of {steps} steps of {samples} samples in Chromium"
    yield f"first paint {paint}, a numeric filter {choice}, a text search {search}"
    yield f"DuckDB takes {slower} and {slow} times as long for the filter and the search"
    name = "docs/viewer.md"
    yield name, f"| first paint, first chart | {paint}, {chart} |"
    yield name, f"| a filter by score, … | {choice} |"
    yield name, f"| a search for a word, … | {search} |"
    yield name, f"| the index of a million samples, … | {file['index_s']:.0f} s |"
    yield name, f"takes {slower} times as long for the filter and {slow} times for the search"
    yield name, f"on two cores (load {file['load']:.0f};"


def sandbox(file: Any) -> Shown:
    own, python = file["of_sandbox"], file["of_python"]
    spent, ratio = f"{own['cpu_ms']:.1f} ms of processor time", f"{file['ratio']:.2f}"
    yield f"`python benchmarks/sandbox.py --runs {file['runs']}` | A program that prints 1: {spent}"
    yield f"under sandlock, {ratio} times Python's own start"
    name = "docs/sandbox.md"
    yield name, f"(load {file['load']:.0f}), spent {spent} on a run"
    yield name, f"{ratio} times the {python['cpu_ms']:.1f} ms that Python's start took"
    yield name, f"{own['per_core_second']:.0f} runs for each second of a core"


def reward_pool(file: Any) -> Shown:
    name, count, scores = "docs/rewards.md", file["counts"], file["scores"]
    hung, killed, leaked = (round(100 * count[key] / scores) for key in ("timeouts", "died", "recycled"))
    shown = f"{scores:,} scores of {1000 * file['work']:.0f} ms in {word(file['workers'])} processes"
    yield name, f"`python benchmarks/reward_pool.py --limit {file['limit']}`: {shown}"
    yield name, f"of which {hung} % hang, {killed} % are killed and {leaked} % leak"
    yield name, f"took {file['seconds']:.1f} s, {file['ratio']:.2f} times (work + hangs × limit) / processes"
    yield name, f"with {'every' if file['wrong'] == 0 else 'not every'} score accounted for"


def demo_tasks(file: Any) -> Shown:
    for task, run in file["tasks"].items():
        row = f"| {run['before']:.3f} | {run['after']:.3f} | {run['seconds']:.0f} |"
        yield "docs/tasks.md", f"| `{task}` | … {row}"


def families_learn(file: Any) -> Shown:
    for name, run in file["families"].items():
        loads = {key.removeprefix("router/"): run[key] for key in run if key.startswith("router/load")}
        place = "docs/mixtures.md" if loads else "docs/models.md"
        yield place, f"| `{name}` | " + " | ".join(f"{right:.3f}" for _, right in run["curve"])
        for load, values in loads.items():  # of the first update, and of every fifth
            shown = " | ".join(f"{values[max(step, 1) - 1]:.2f}" for step, _ in run["curve"])
            yield place, f"| `{name}`: {load} | {shown}"


def healthy_runs(file: Any) -> Shown:
    told = f"{word(len(file['alarms']))} got a warning"
    yield (
        "docs/museum.md",
        f"Of {file['runs']} healthy runs of {file['steps']} steps with random settings"
        f" (`python benchmarks/healthy_runs.py`), {told}",
    )


def tutorials(file: Any) -> Shown:
    first, last = (file["first-run"]["validation"][place][1] for place in (0, -1))
    yield "docs/tutorials/two-processes.md", f"an accuracy of {last:.3f} from {first:.3f}, in both"
    yield f"the demo: accuracy {first:.3f} before, {last:.3f} after"
    first, last = (file["own-reward"]["right"][place][1] for place in (0, -1))
    yield "docs/tutorials/own-reward.md", f"rises from {first:.2f} to {last:.2f}"
    steps = file["reward-model"]["score"][-1][0]
    yield "docs/tutorials/reward-model.md", f"After {steps} steps the policy writes"


def scoreboard(file: Any) -> Shown:
    """Yield the phrases of the scoreboard; other tests check its table."""
    loads = span((load for row in file["rows"] for load in row["load"]), ".0f")
    yield "docs/scoreboard.md", f"a run ends when it is {file['target']}"
    yield "docs/scoreboard.md", f"the machine had other work (load {loads} on two cores)"
    ratios = [
        median(row["trl"]["cpu_seconds"] / row["tandem"]["cpu_seconds"] for row in rows)
        for _, rows in groupby(sorted(file["rows"], key=itemgetter("task")), itemgetter("task"))
    ]
    yield "README.md", f"TRL takes {span(ratios, '.1f')} times as long"
    yield "docs/scoreboard.md", f"on {word(len({row['task'] for row in file['rows']}))} tasks of"


def bench(file: Any) -> Shown:
    for line in markdown(file).splitlines():
        if line.startswith("| "):
            yield "docs/bench.md", line
    yield "docs/bench.md", f"with a load of {file['machine']['load before']:.1f}"
    operations, copied = (file["rates"][name] / 1e9 for name in ("operations", "bytes"))
    yield "docs/bench.md", f"of {operations:.1f} GFLOP/s and {copied:.1f} GB/s"


def routing_replay(file: Any) -> Shown:
    first, second = (
        {
            mode: one(file["rows"], model=model, passes="rollout, old", mode=mode)
            for mode in ("disabled", "R3")
        }
        for model in ("qwen3_moe", "deepseek_v3")
    )
    shares = [f"{100 * each['disabled']['experts_differ']:.1f}%" for each in (first, second)]
    yield "docs/mixtures.md", "{} of the experts differently in a Qwen3-MoE and {} in".format(*shares)
    plain, replayed = (
        [f"{each[mode]['log_prob_diff_max']:.2f}" for each in (first, second)] for mode in ("disabled", "R3")
    )
    words = f"{plain[0]} and {plain[1]} nats without replay, and {replayed[0]} and {replayed[1]} with R3"
    yield "docs/mixtures.md", words


FIGURES = (
    rollout_vs_vllm, rollout_vs_sglang, grpo_step_vs_trl, gpu_decode, gpu_step, dispatch, controller_traffic,
    log_prob_head, packing, update_vs_trl, levers, advantages, learning_curves, learning_warnings, data_rows,
    viewer, sandbox, reward_pool, demo_tasks, families_learn, healthy_runs, tutorials, scoreboard, bench,
    routing_replay,
    *PLANS,
)  # fmt: skip
SHOWN = {f"{each.__name__}.json": each for each in FIGURES}
UNSHOWN = {"mixture_model.json", "weight_sync.json", "window_model.json"}
"""Files without a figure on any page."""


def test_there_is_a_function_for_every_file():
    assert {path.name for path in RESULTS.glob("*.json")} == SHOWN.keys() | UNSHOWN


@pytest.mark.parametrize("file", SHOWN)
def test_pages_show_what_the_file_says(file):
    found = SHOWN[file](json.loads((RESULTS / file).read_text("utf-8")))
    shown = [(MEASURED, each) if isinstance(each, str) else each for each in found]
    assert shown
    assert [(name, phrase) for name, phrase in shown if times_in(page(name), phrase) != 1] == []


def test_a_figure_is_found_as_it_is():
    text = plain("off by 5.0% in\nthe median, 2.81 <!-- = a.json b --> times; | `ab` | words | 0.43 |")
    shown = "off by 5.0% in the median", "2.81 times", "| `ab` | … | 0.43 |"
    assert [times_in(text, phrase) for phrase in shown] == [1, 1, 1]
    assert [times_in(text, phrase) for phrase in ("off by 5%", ".0% in", "0.4", "81 times")] == [0, 0, 0, 0]


def test_a_comparison_of_schedules_is_what_the_command_says(capsys):
    shown = [block.text for block in blocks(ROOT / "docs" / "before-a-run.md")]
    (at,) = (index for index, text in enumerate(shown) if "--schedule" in text)
    assert main([str(ROOT / word) if "/" in word else word for word in shown[at].split()[1:]]) == 0
    assert capsys.readouterr().out.endswith(shown[at + 1])
