import os
from collections import Counter

import pytest

from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native import memory
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import ConfigError, ConfigErrors, DataError, EngineError
from tandem.observability.timers import read_timeline
from tests.e2e.keys import flat, responses, tries, validated
from tests.e2e.shop import BATCH, DOCUMENT, MINI, N
from tests.support.tiny import problem, write_rows
from tests.support.words import full

VALIDATED = "trainer.val_before_train=true"


@tries("data.train_files")
def test_training_prompts_come_from_the_train_files(shop, base):
    other = write_rows(shop.folder / "other.parquet", [problem(90, b) for b in range(5)])
    run = shop.run("other_data", f"data.train_files=[{other}]")
    assert {message["content"][:3] for row in run.samples(1)["messages"] for message in row} == {"90+"}
    assert responses(run) != responses(base)


@tries("data.val_files trainer.val_before_train")
def test_validation_takes_the_val_files(shop, base):
    assert [row["step"] for row in base.rows] == [1]
    run = shop.run("validated", VALIDATED)
    assert [row["step"] for row in run.rows] == [0, 1]
    assert "val/accuracy" in run.rows[0]
    assert validated(run)["index"] == list(range(8))
    smaller = write_rows(shop.folder / "small_val.parquet", [problem(90, b) for b in range(3)])
    assert len(validated(shop.run("other_val", VALIDATED, f"data.val_files={smaller}"))["tokens"]) == 3


@tries("data.filter_overlong_prompts data.max_prompt_length")
def test_prompts_above_the_limit_are_left_out(shop, base):
    """3+2= and 7+2= have four tokens; 11+2= and all others have five."""
    assert base.trainer.prompts.steps_per_epoch == 24 // 4
    words = f"data.max_prompt_length=4 data.val_files={shop.train}"
    run = shop.run("filtered", words)
    assert run.trainer.prompts.steps_per_epoch == 14 // 4
    assert run.rows[0]["prompt_length/max"] == 4
    with pytest.raises(DataError, match=r"10 row\(s\) of 24"):
        shop.run("unfiltered", words, "data.filter_overlong_prompts=false")


@tries("data.truncation")
@pytest.mark.parametrize(("mode", "kept"), [("left", "1+2="), ("right", "11+2"), ("middle", "112=")])
def test_prompts_above_the_limit_are_cut(shop, mode, kept):
    data = write_rows(shop.folder / "long.parquet", [problem(11, 2)] * 4)
    words = f"data.train_files={data} data.max_prompt_length=4 data.filter_overlong_prompts=false"
    run = shop.run(f"cut_{mode}", words, f"data.truncation={mode}")
    tokenizer = run.trainer.roles.reward._workers._worker.tokenizer
    for tokens, mask in run.each(1, "tokens", "response_mask"):
        prompt = [token for token, written in zip(tokens, mask, strict=True) if not written]
        assert tokenizer.decode(prompt) == kept


@tries("R.name")
def test_the_engine_is_the_one_named(shop, base):
    """Both engines draw the same tokens; the native engine computes a prompt once for all its samples."""
    run = shop.run("hf", "R.name=hf")
    assert isinstance(base.actor.parts["rollout"].engine, NativeEngine)
    assert isinstance(run.actor.parts["rollout"].engine, HFEngine)
    assert responses(run) == responses(base)
    assert run.rows[0]["rollout/prefill_tokens"] == N * base.rows[0]["rollout/prefill_tokens"]


@tries("R.gpu_memory_utilization")
def test_the_share_of_memory_bounds_the_sequences_that_run_at_once(shop, base, monkeypatch):
    """A sequence fits into a block of 4 KiB: 2 layers, 2 heads of keys and values, 8 numbers, 16 tokens."""
    assert base.rows[0]["rollout/peak_running"] == BATCH * N
    monkeypatch.setattr(memory, "host_total", lambda: 32 * 1024)
    for share, rows in ((1.0, 8), (0.5, 4)):
        run = shop.run(f"share_{share}", f"R.gpu_memory_utilization={share}")
        assert run.rows[0]["rollout/peak_running"] == rows
        assert run.rows[0]["rollout/cache_bytes"] == rows * 4096
        assert responses(run) == responses(base)
    with pytest.raises(EngineError, match="gpu_memory_utilization"):
        shop.run("share_0.1", "R.gpu_memory_utilization=0.1")


@tries("R.temperature")
def test_the_temperature_is_that_of_sampling_and_of_training(shop, base):
    hot, cold = (shop.run(f"temperature_{t}", f"R.temperature={t}") for t in (1.5, 0.01))
    rows = [run.rows[0] for run in (hot, base, cold)]
    assert all(row["rollout/log_prob_diff_max"] < 1e-4 for row in rows)
    entropies = [row["actor/entropy"] for row in rows]
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[-1] < 0.1 < 1 < entropies[0]


@tries("R.top_k R.top_p")
def test_truncated_sampling(shop, base):
    """A top_k above the vocabulary size is no limit; a single remaining token is the greedy one."""
    unlimited = shop.run("top_k_-1", "R.top_k=-1")
    assert responses(unlimited) == responses(base)
    assert flat(unlimited, 1, "rollout_log_probs")[0] == pytest.approx(flat(base, 1, "rollout_log_probs")[0])
    for word in ("R.top_k=1", "R.top_p=1e-6"):
        run = shop.run(word, VALIDATED, f"data.val_files={shop.train} data.shuffle=false", word)
        greedy = validated(run)["response_text"]
        assert all(text == greedy[row] for text, row in run.each(1, "response_text", "index"))
        kept, whole = flat(run, 1, "rollout_log_probs", "rollout_log_probs_untruncated")
        assert not kept.any() and (whole < -0.1).any()


@tries("A.ulysses_sequence_parallel_size R.tensor_model_parallel_size")
@pytest.mark.parametrize("name", ["A.ulysses_sequence_parallel_size", "R.tensor_model_parallel_size"])
def test_parallel_sizes_that_are_not_there_are_refused(shop, name):
    with pytest.raises(ConfigErrors) as caught:
        shop.run("parallel", f"{name}=2")
    (error,) = caught.value.errors
    assert error.field == full(name)
    assert f"{full(name)}=1" in str(error.remedy)
    assert not (shop.folder / "parallel").exists()


@pytest.mark.slow
@tries("trainer.nnodes")
def test_more_machines_than_there_are_are_refused_on_ray(shop, ray_cluster):
    with pytest.raises(ConfigError, match=r"1 \+ 1 process\(es\) on 2 node\(s\)"):
        shop.run("machines", "trainer.nnodes=2")
    assert not (shop.folder / "machines").exists()


@pytest.mark.slow
@tries("trainer.n_gpus_per_node")
def test_there_is_a_process_per_device_on_ray(shop, base, ray_cluster):
    run = shop.run("devices", "trainer.n_gpus_per_node=2")
    events = read_timeline(run.folder / "timeline.json")
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"actor rank 0", "actor rank 1"} <= tracks
    assert responses(run) == responses(base)
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl"):
        assert run.rows[0][name] == pytest.approx(base.rows[0][name], rel=1e-4, abs=1e-5), name


@tries("trainer.logger")
def test_loggers(shop, base, capsys):
    assert "step 1/1" not in capsys.readouterr().out
    assert not (base.folder / "tensorboard").exists()
    run = shop.run("loggers", f"trainer.logger={DOCUMENT['trainer.logger']}")
    assert "step 1/1" in capsys.readouterr().out
    (events,) = (run.folder / "tensorboard").iterdir()
    assert b"actor/kl" in events.read_bytes()


@tries("trainer.project_name trainer.experiment_name")
def test_the_names_make_the_run_folder(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    default = "trainer.default_local_dir=runs/${trainer.project_name}/${trainer.experiment_name}"
    for project, name in (("p", "a"), ("p", "b"), ("q", "a")):
        shop.run("unused", f"trainer.project_name={project} trainer.experiment_name={name} {default}")
        assert (tmp_path / "runs" / project / name / "metrics.jsonl").is_file()


def saved(run):
    return sorted(int(name.removeprefix("step_")) for name in os.listdir(run.folder / "checkpoints"))


def samples_per_prompt(run):
    return list(Counter(run.samples(1)["uid"]).values())


def updates(run):
    return len(samples_per_prompt(run)), run.actor.actor.version


def validations(run):
    return [row["step"] for row in run.rows if "val/accuracy" in row]


def epochs(run):
    return [row["training/epoch"] for row in run.rows]


EPOCHS = "data.train_batch_size=12 steps=null"  # of two steps
NUMBERS = [
    ("data.train_batch_size", "", updates, {2: (2, 2 // MINI), 6: (6, 6 // MINI)}),
    ("data.max_response_length", "", lambda run: run.rows[0]["response_length/max"], {2: 2, 9: 9}),
    ("R.n", "", samples_per_prompt, {2: [2] * 4, 5: [5] * 4}),
    ("trainer.save_freq", "steps=3", saved, {1: [1, 2, 3], 2: [2, 3], 50: [3], -1: [3], 0: []}),
    ("trainer.test_freq", "steps=3", validations, {2: [2, 3], -1: []}),
    ("trainer.total_epochs", EPOCHS, epochs, {1: [0, 0], 2: [0, 0, 1, 1]}),
]  # key, other words, what is found, and its value for each number


@tries(" ".join(key for key, *_ in NUMBERS))
@pytest.mark.parametrize(
    ("word", "more", "found", "wanted"),
    [(f"{key}={n}", more, found, values[n]) for key, more, found, values in NUMBERS for n in values],
)
def test_a_number_makes_a_number(shop, word, more, found, wanted):
    assert found(shop.run(word, word, more)) == wanted
