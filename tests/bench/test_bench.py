import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoConfig

from tandem.bench import measure
from tandem.bench.asked import load
from tandem.bench.documents import DOCUMENTS, published
from tandem.bench.report import compared, markdown, throughput
from tandem.cli.main import main
from tandem.config.root import TrainConfig
from tandem.memory import shapes
from tandem.memory.device_file import read_devices
from tandem.memory.shapes import model_shape, shape_of
from tandem.observability.run import read_samples
from tests.support.words import words as full_words

STORED = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
STORED |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
STORED |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256}
SIZES = full_words(
    "algorithm.adv_estimator=gae data.train_batch_size=4 R.n=2 A.ppo_mini_batch_size=2 A.use_kl_loss=true",
    "critic.ppo_mini_batch_size=4 data.max_prompt_length=12 data.max_response_length=20 trainer.device=cpu",
)
LENGTHS = ("--lengths", "uniform:4:24", "--prompt-lengths", "uniform:2:10")


def bench(folder: Path, *words: Any) -> int:
    """Run `tandem bench` on dummy weights, and write report.json, device.json and the folder `all`."""
    model = folder / "config.json"
    model.write_text(json.dumps(STORED))
    files = ("--folder", folder / "all", "--out", folder / "report.json")
    files += ("--device-file", folder / "device.json")
    given = ("bench", "--dummy", f"actor_rollout_ref.model.path={model}", *SIZES, *LENGTHS, *files, *words)
    return main([*map(str, given)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("bench")
    assert bench(place, "--steps", "2") == 0
    return place


def test_dummy_data_are_not_warned_of(monkeypatch):
    class Built(Exception):
        """Stands for the run."""

    def build(config: Any, *, say: Callable[[str], None]) -> None:
        say("Warning after step 1: every response was scored 0.")
        say("trains")
        raise Built

    said: list[str] = []
    monkeypatch.setattr(measure, "build_ppo", build)
    with pytest.raises(Built):
        measure._run(cast(TrainConfig, None), said.append)
    assert said == ["trains"]


def report(made: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / "report.json").read_text())
    return found


def test_responses_have_the_lengths_asked_for_in_every_step(made):
    asked = Counter([5, 8, 10, 13, 15, 18, 20, 20])  # eight quantiles; two are above the longest length
    for step in (1, 2, 3):
        table = read_samples(made / "all" / "run" / "samples" / f"step_{step:06d}.parquet")
        assert Counter(sum(mask) for mask in table["response_mask"]) == asked
        assert set(table["finish_reason"]) == {"length"}
    lengths = report(made)["lengths"]
    assert (lengths["response"], lengths["total"]) == (asked.total() + 101, 157)


def test_all_phases_are_there_with_median_and_floor(made):
    rows = report(made)["rows"]
    assert rows["response_length"] == {"median": 13.625, "least": 13.625, "most": 13.625}
    for phase in "gen generate_sequences reshard old_log_prob ref values update_actor step".split():  # noqa: SIM905
        row = rows[phase]
        assert row["floor"] > 0 and row["share"] == pytest.approx(row["floor"] / row["median"])
        assert row["least"] <= row["median"] <= row["most"]
    assert {"reward", "adv", "update_critic", "save_checkpoint"} <= set(rows)
    parts = report(made)["parts"]
    assert sum(parts.values()) == pytest.approx(rows["step"]["median"]) and min(parts.values()) > 0


def test_parts_of_steps_that_differ_add_up_to_the_median_step():
    """The sum of the phases' medians is 12.5, and the median of the steps is 11.5."""
    gens, rewards, updates, steps = (4, 1, 6), (4, 6, 1), (1, 4, 6), (9.5, 11.5, 14)
    measured = [
        {"gen": g, "generate_sequences": g - 0.5, "reward": r, "update_actor": u, "step": s}
        for g, r, u, s in zip(gens, rewards, updates, steps, strict=True)
    ]
    found = measure.step_parts(measured)
    whole = 3.5 + 0.5 + 4 + 4 + 0.5
    expected = {"generate_sequences": 3.5, "weights": 0.5, "reward": 4, "update_actor": 4, "rest": 0.5}
    assert found == pytest.approx({phase: part * 11.5 / whole for phase, part in expected.items()})


def test_a_step_may_lack_a_phase():
    """For example, the actor's update is missing while the critic warms up."""
    warming = {"gen": 1.0, "generate_sequences": 1.0, "update_critic": 1.0, "step": 2.0}
    full = warming | {"update_actor": 2.0, "step": 4.0}
    for steps in ([warming, full, full], [full, warming, full]):
        found = measure.step_parts(steps)
        assert found["update_actor"] == pytest.approx(2.0) and sum(found.values()) == pytest.approx(4.0)


def test_throughput_is_tokens_over_seconds(made):
    found = report(made)
    found["machine"] |= {"devices": 4, "actor devices": 4, "rollout devices": 2}
    found["passes"] = 2
    found["rows"] = {name: {"median": 10.0} for name in ("gen", "old_log_prob", "update_actor", "step")}
    found["lengths"] |= {"response": 600, "total": 1000}
    assert throughput(found) == {
        "gen throughput": (30, 60),
        "prev logprob throughput": (25, 100),
        "training throughput": (50, 200),
        "step throughput": (25, 100),
    }


def test_the_table_names_machine_and_command(made):
    text = markdown(report(made))
    assert "| update_critic | " in text and "| save_checkpoint | " in text and "TFLOP/s" in text
    assert text.splitlines()[-1].startswith("`tandem")
    assert "verl" not in text  # the document has no figures for other models
    model = shapes.published("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    theirs = markdown(report(made) | {"model": model})
    (gen,) = (line for line in theirs.splitlines() if line.startswith("| gen | "))
    assert gen.endswith("| 260.9 | 266.1 |")
    assert "| 6,993 | 6,801 |" in theirs and "Sequence Parallelism 2" in theirs and "of two GPUs" in theirs


def test_two_reports_side_by_side(made, capsys):
    first, second = report(made), report(made)
    second["rows"]["gen"]["median"] = first["rows"]["gen"]["median"] / 2
    second["config"]["data.train_batch_size"] = 5
    second["versions"]["torch"] = "9.9"
    text = compared(first, second)
    assert "| 2.00 |\n" in text and "| data.train_batch_size | 4 | 5 |" in text and "| 9.9 |" in text
    assert main(["bench", "compare", str(made / "report.json"), str(made / "report.json")]) == 0
    assert "| step | " in capsys.readouterr().out
    assert main(["bench", "compare", str(made / "report.json"), str(made / "device.json")]) == 1
    assert "not a report of tandem bench" in capsys.readouterr().err


def test_what_was_measured_predicts_itself(made, capsys):
    ((name, device),) = read_devices(made / "device.json").items()
    assert name.endswith("float32") and device.item == 4
    model = f"actor_rollout_ref.model.path={made / 'config.json'}"
    own = ("--json", "trainer.total_training_steps=1000", "--device-file", made / "device.json")
    words = (model, *SIZES, *LENGTHS, *own)
    assert main(["bench", "predict", *map(str, words)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["phases"]["step"] == pytest.approx(report(made)["rows"]["step"]["median"], rel=1e-6)
    assert found["device_hours"] == pytest.approx(found["phases"]["step"] / 3.6)
    assert main(["bench", "predict", *map(str, words), "--device", "another"]) == 1
    assert name in capsys.readouterr().err
    assert main(["bench", "predict", *map(str, words), "--device-file", str(made / "none.json")]) == 1
    assert "`tandem bench`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "google/gemma-3-1b-it"]
)
def test_a_published_name_is_a_model_that_transformers_makes(name, tmp_path):
    words = (f"actor_rollout_ref.model.path={name}", *SIZES)
    config, given = load(words, tmp_path, dummy=True)
    made = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
    assert given["actor_rollout_ref.model.path"] == name
    assert made.max_position_embeddings == 131072
    assert model_shape(made.to_dict()) == shape_of(name)


def test_mistakes_are_told_before_anything_runs(made, capsys):
    model = f"actor_rollout_ref.model.path={made / 'config.json'}"
    for words, told in (
        (["--dummy", "actor_rollout_ref.model.path=Qwen/None"], "does not describe a model"),
        (["--dummy", model, *SIZES, "--lengths", "999"], "lengths out of range"),
        (
            ["--dummy", model, *SIZES, "trainer.worker_classes={actor: tandem.workers.actor:ActorWorker}"],
            "its own worker",
        ),
        ([model, "data.train_batch_sise=4"], "data.train_batch_size"),
    ):
        assert main(["bench", *words]) == 1
        assert told in capsys.readouterr().err


def test_the_documents_figures_agree_with_each_other():
    seven, verl, rlinf = DOCUMENTS
    assert seven.rows["generate_sequences"] + seven.rows["reshard"] < seven.rows["gen"] < seven.rows["step"]
    for each, gen in ((verl, 6992.96), (rlinf, 6800.64)):
        assert each.throughput["gen throughput"] == gen
        # RLinf's own rate is 1.1% above the rate from its seconds and its length
        assert 512 * each.rows["response_length"] / each.rows["gen"] / 4 == pytest.approx(gen, rel=0.012)
        of_a_gpu = 512 * each.rows["response_length"] / each.rows["old_log_prob"] / 8  # without prompts
        assert of_a_gpu == pytest.approx(each.throughput["prev logprob throughput"], rel=0.015)
    assert published(shapes.published(verl.model) or {}) == (verl, rlinf)
    assert published(shapes.published(seven.model) or {}) == (seven,)
    assert published(STORED) == ()
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    for each in DOCUMENTS:
        for number in (*each.rows.values(), *each.throughput.values()):
            assert f"| {number:.10g} |" in page or f"| {number} |" in page
        assert all(f"{name} {value}" in page for name, value in each.parameters.items())
