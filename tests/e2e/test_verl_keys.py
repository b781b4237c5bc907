"""Every key of the document's command line does what it says: each is changed, and an effect named that
the change has on a run. The last test holds the keys tried here against those of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native import memory
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import ConfigErrors, DataError, EngineError
from tandem.observability.run import read_samples
from tests.e2e.shop import DOCUMENT, Shop
from tests.e2e.watch import Watched, watch
from tests.support.runs import Finished
from tests.support.tiny import make_model, problem, write_rows

Test = TypeVar("Test", bound=Callable[..., None])

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
SAMPLES = DOCUMENT["data.train_batch_size"] * DOCUMENT[f"{ROLLOUT}.n"]
UPDATES = DOCUMENT["data.train_batch_size"] // DOCUMENT[f"{ACTOR}.ppo_mini_batch_size"]
BY_SAMPLES = f"{ACTOR}.use_dynamic_bsz=false"
FAST = f"{ACTOR}.optim.lr=0.02"

TRIED: set[str] = set()


def tries(*names: str) -> Callable[[Test], Test]:
    """Marks a test as one that changes these keys."""
    TRIED.update(names)
    return lambda test: test


@pytest.fixture(scope="module")
def base(shop: Shop) -> Finished:
    return shop.run("base")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return watch(monkeypatch)


def responses(run: Finished, step: int = 1) -> list[list[int]]:
    samples = run.samples(step)
    return [
        [token for token, written in zip(tokens, mask, strict=True) if written]
        for tokens, mask in zip(samples["tokens"], samples["response_mask"], strict=True)
    ]


def same_weights(a: Finished, b: Finished) -> bool:
    first, second = a.weights(), b.weights()
    return all(torch.equal(first[name], second[name]) for name in first)


def flat(run: Finished, step: int, *columns: str) -> list[np.ndarray]:
    """Per-token columns at response tokens."""
    samples = run.samples(step)
    mask = np.concatenate([np.array(row) for row in samples["response_mask"]])
    return [np.concatenate([np.array(row) for row in samples[name]])[mask] for name in columns]


# Algorithm.


@tries("algorithm.adv_estimator")
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_the_estimator_makes_the_advantages(shop: Shop, estimator: str) -> None:
    samples = shop.run(f"estimator_{estimator}", f"algorithm.adv_estimator={estimator}").samples(1)
    scores = np.array(samples["scores"]).reshape(-1, DOCUMENT[f"{ROLLOUT}.n"])
    assert scores.std() > 0
    others = scores.sum(1, keepdims=True) - scores
    expected = {
        "grpo": (scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-6),
        "rloo": scores - others / (scores.shape[1] - 1),
    }[estimator]
    for row, mask, value in zip(
        samples["advantages"], samples["response_mask"], expected.ravel(), strict=True
    ):
        assert np.array(row)[np.array(mask)] == pytest.approx(value, abs=1e-5)


@tries("algorithm.use_kl_in_reward")
def test_kl_in_the_reward_lowers_it_by_the_kl(shop: Shop) -> None:
    words = ("trainer.total_training_steps=2", FAST)
    plain = shop.run("no_kl_in_reward", *words)
    scores, rewards = flat(plain, 2, "token_level_scores", "token_level_rewards")
    assert (scores == rewards).all()
    run = shop.run("kl_in_reward", *words, "algorithm.use_kl_in_reward=true")
    scores, rewards, old, ref = flat(
        run, 2, "token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_probs"
    )
    assert np.abs(old - ref).max() > 0.01
    assert rewards == pytest.approx(scores - 0.001 * (old - ref), abs=1e-6)


@tries(f"{ACTOR}.use_kl_loss")
def test_the_kl_loss_asks_for_the_reference(shop: Shop, base: Finished) -> None:
    assert {"actor/kl_loss", "timing/ref"} <= set(base.rows[0])
    assert "ref_log_probs" in base.samples(1)
    run = shop.run("no_kl_loss", f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef=0")
    assert {"actor/kl_loss", "timing/ref"}.isdisjoint(run.rows[0])
    assert run.actor.reference is None


@tries(f"{ACTOR}.kl_loss_coef")
def test_the_kl_losss_weight_is_in_the_loss_and_the_gradient(shop: Shop) -> None:
    words = ("trainer.total_training_steps=2", f"{ACTOR}.ppo_mini_batch_size=4", FAST)
    low, high = (shop.run(f"kl_coef_{c}", *words, f"{ACTOR}.kl_loss_coef={c}") for c in (0.001, 2.0))
    for run, coef in ((low, 0.001), (high, 2.0)):
        row = run.rows[1]
        assert row["actor/kl_loss"] > 1e-3
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] + coef * row["actor/kl_loss"], abs=1e-5)
    assert high.rows[1]["actor/grad_norm"] != pytest.approx(low.rows[1]["actor/grad_norm"], rel=1e-3)
    assert not same_weights(low, high)


@tries(f"{ACTOR}.kl_loss_type")
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_the_kl_losss_kind_is_its_formula(shop: Shop, kind: str) -> None:
    """One update per step, so that the loss is taken at the weights that sampled."""
    run = shop.run(
        f"kind_{kind}",
        "trainer.total_training_steps=2",
        f"{ACTOR}.ppo_mini_batch_size=4",
        FAST,
        f"{ACTOR}.kl_loss_type={kind}",
    )
    now, ref = flat(run, 2, "rollout_log_probs", "ref_log_probs")
    gap = (now - ref).astype(np.float64)
    expected = {
        "kl": gap,
        "abs": np.abs(gap),
        "mse": gap**2 / 2,
        "low_var_kl": np.minimum(np.exp(-gap) - 1 + gap, 10),
    }[kind]
    assert np.abs(gap).max() > 0.01
    assert run.rows[1]["actor/kl_loss"] == pytest.approx(expected.mean(), rel=1e-3, abs=1e-5)


@tries(f"{ACTOR}.entropy_coeff")
def test_the_entropy_bonus_is_in_the_loss_and_the_gradient(shop: Shop) -> None:
    words = (f"{ACTOR}.ppo_mini_batch_size=4",)
    without, bonus = (shop.run(f"entropy_{c}", *words, f"{ACTOR}.entropy_coeff={c}") for c in (0, 0.5))
    row = bonus.rows[0]
    assert row["actor/entropy"] == pytest.approx(without.rows[0]["actor/entropy"])
    assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] - 0.5 * row["actor/entropy"], abs=1e-5)
    assert row["actor/grad_norm"] != pytest.approx(without.rows[0]["actor/grad_norm"], rel=1e-3)


@tries("trainer.critic_warmup")
def test_critic_warm_up_leaves_the_policy_alone(shop: Shop) -> None:
    words = ("algorithm.adv_estimator=gae", "trainer.total_training_steps=2")
    cold = shop.run("cold", *words)
    warm = shop.run("warm", *words, "trainer.critic_warmup=1")
    assert cold.actor.actor.version == 2 * UPDATES
    assert warm.actor.actor.version == UPDATES
    assert "actor/loss" not in warm.rows[0]
    assert "critic/loss" in warm.rows[0]


# Data.


@tries("data.train_files")
def test_training_prompts_come_from_the_train_files(shop: Shop, base: Finished) -> None:
    other = write_rows(shop.folder / "other.parquet", [problem(90, b) for b in range(5)])
    run = shop.run("other_data", f"data.train_files=[{other}]")
    assert {message["content"][:3] for row in run.samples(1)["messages"] for message in row} == {"90+"}
    assert responses(run) != responses(base)


@tries("data.val_files", "trainer.val_before_train")
def test_validation_takes_the_val_files(shop: Shop, base: Finished) -> None:
    assert [row["step"] for row in base.rows] == [1]
    run = shop.run("validated", "trainer.val_before_train=true")
    assert [row["step"] for row in run.rows] == [0, 1]
    assert "val/accuracy" in run.rows[0]
    assert validated(run)["index"] == list(range(8))
    smaller = write_rows(shop.folder / "small_val.parquet", [problem(90, b) for b in range(3)])
    other = shop.run("other_val", "trainer.val_before_train=true", f"data.val_files={smaller}")
    assert len(validated(other)["tokens"]) == 3


def validated(run: Finished, step: int = 0) -> dict[str, list[Any]]:
    return read_samples(run.folder / "samples" / f"step_{step:06d}_val.parquet")


@tries("data.train_batch_size")
@pytest.mark.parametrize("size", [2, 6])
def test_a_step_takes_so_many_prompts(shop: Shop, size: int) -> None:
    run = shop.run(f"batch_{size}", f"data.train_batch_size={size}")
    assert len(set(run.samples(1)["uid"])) == size
    assert run.actor.actor.version == size // DOCUMENT[f"{ACTOR}.ppo_mini_batch_size"]


@tries("data.filter_overlong_prompts", "data.max_prompt_length")
def test_prompts_above_the_limit_are_left_out(shop: Shop, base: Finished) -> None:
    """3+2= and 7+2= have four tokens, 11+2= and all others five."""
    assert base.trainer.loader.steps_per_epoch == 24 // 4
    words = ("data.max_prompt_length=4", f"data.val_files={shop.train}")
    run = shop.run("filtered", *words)
    assert run.trainer.loader.steps_per_epoch == 14 // 4
    assert run.rows[0]["prompt_length/max"] == 4
    with pytest.raises(DataError, match=r"10 row\(s\) of 24 are over the length limit"):
        shop.run("unfiltered", *words, "data.filter_overlong_prompts=false")


@tries("data.truncation")
@pytest.mark.parametrize(("mode", "kept"), [("left", "1+2="), ("right", "11+2"), ("middle", "112=")])
def test_prompts_above_the_limit_are_cut(shop: Shop, mode: str, kept: str) -> None:
    data = write_rows(shop.folder / "long.parquet", [problem(11, 2)] * 4)
    run = shop.run(
        f"cut_{mode}",
        f"data.train_files={data}",
        "data.max_prompt_length=4",
        "data.filter_overlong_prompts=false",
        f"data.truncation={mode}",
    )
    samples = run.samples(1)
    tokenizer = run.trainer.roles.reward._workers._worker.tokenizer
    for tokens, mask in zip(samples["tokens"], samples["response_mask"], strict=True):
        prompt = [token for token, written in zip(tokens, mask, strict=True) if not written]
        assert tokenizer.decode(prompt) == kept


@tries("data.max_response_length")
@pytest.mark.parametrize("length", [2, 9])
def test_responses_end_at_their_greatest_length(shop: Shop, length: int) -> None:
    run = shop.run(f"response_{length}", f"data.max_response_length={length}")
    assert run.rows[0]["response_length/max"] == length


# Model.


@tries("actor_rollout_ref.model.path")
def test_the_model_is_the_one_in_the_folder(shop: Shop, base: Finished) -> None:
    other = make_model(shop.folder / "other_model", seed=1, num_hidden_layers=3)
    run = shop.run("other_model", f"actor_rollout_ref.model.path={other}")
    assert len(run.actor.actor.module.decoder.layers) == 3
    assert len(run.actor.reference.module.decoder.layers) == 3
    assert responses(run) != responses(base)


@tries("actor_rollout_ref.model.use_remove_padding")
def test_without_packing_each_micro_batch_is_a_rectangle(shop: Shop, watched: Watched) -> None:
    words = (BY_SAMPLES, f"{ACTOR}.ppo_micro_batch_size_per_gpu=6")
    packed = shop.run("packed", *words)
    tokens = sum(part.whole_tokens for part in watched.update)
    assert tokens == packed.rows[0]["tokens/total"]
    watched.update.clear()
    padded = shop.run("padded", *words, "actor_rollout_ref.model.use_remove_padding=false")
    assert all(part.tokens % part.sequences == 0 for part in watched.update)
    assert sum(part.whole_tokens for part in watched.update) > tokens
    assert responses(padded) == responses(packed)
    assert padded.rows[0]["actor/grad_norm"] == pytest.approx(packed.rows[0]["actor/grad_norm"], rel=1e-4)


@tries("actor_rollout_ref.model.enable_gradient_checkpointing")
def test_checkpointing_runs_every_layer_again_in_the_backward_pass(shop: Shop, watched: Watched) -> None:
    shop.run("checkpointed")
    again, watched.layer_forwards = watched.layer_forwards, 0
    shop.run("not_checkpointed", "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    assert again == 2 * watched.layer_forwards > 0


# Optimizer, mini- and micro-batches.


@tries(f"{ACTOR}.optim.lr")
def test_the_learning_rate_scales_the_update(shop: Shop, base: Finished) -> None:
    start = shop.run("lr_0", f"{ACTOR}.optim.lr=0")
    high = shop.run("lr_high", f"{ACTOR}.optim.lr=1e-3")
    assert [run.rows[0]["actor/lr"] for run in (start, base, high)] == [0, 1e-6, 1e-3]

    def distance(run: Finished) -> float:
        first, last = start.weights(), run.weights()
        return max(float((first[name] - last[name]).abs().max()) for name in first)

    assert 0.3e-6 < distance(base) < 5e-6
    assert 0.3e-3 < distance(high) < 5e-3


@tries(f"{ACTOR}.ppo_mini_batch_size")
@pytest.mark.parametrize("size", [1, 4])
def test_there_is_an_update_per_mini_batch(shop: Shop, size: int, watched: Watched) -> None:
    run = shop.run(f"mini_{size}", f"{ACTOR}.ppo_mini_batch_size={size}", BY_SAMPLES,
                   f"{ACTOR}.ppo_micro_batch_size_per_gpu={SAMPLES}")  # fmt: skip
    assert run.actor.actor.version == 4 // size
    assert [part.sequences for part in watched.update] == [size * DOCUMENT[f"{ROLLOUT}.n"]] * (4 // size)


PHASES = {
    "update": (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu",
               f"{ACTOR}.ppo_max_token_len_per_gpu"),
    "old_log_prob": (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
                     f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    "ref": (f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu",
            f"{REF}.log_prob_max_token_len_per_gpu"),
}  # fmt: skip


@tries(*(name for names in PHASES.values() for name in names))
@pytest.mark.parametrize("phase", list(PHASES))
def test_each_phase_is_cut_by_its_own_keys(shop: Shop, phase: str, watched: Watched) -> None:
    """By samples: that many in each micro-batch. By tokens: as many as fit the budget, whatever the key
    for samples says. The other phases keep to theirs."""
    dynamic, samples, budget = PHASES[phase]
    runs = UPDATES if phase == "update" else 1
    seen = getattr(watched, phase)
    others = [getattr(watched, other) for other in PHASES if other != phase]

    shop.run(f"{phase}_by_samples", f"{dynamic}=false", f"{samples}=2")
    assert [part.sequences for part in seen] == [2] * (SAMPLES // 2)
    assert all(part.whole_tokens <= 40 for other in others for part in other)
    kept = [len(other) for other in others]

    seen.clear()
    shop.run(f"{phase}_by_tokens", f"{samples}=1", f"{budget}=28")
    assert max(part.whole_tokens for part in seen) <= 28
    assert runs < len(seen) < SAMPLES
    assert [len(other) for other in others] == [2 * count for count in kept]

    seen.clear()
    shop.run(f"{phase}_in_one", f"{budget}=1000")
    assert len(seen) == runs


OFFLOADS = {
    f"{REF}.fsdp_config.param_offload": "ref parameters",
    f"{ACTOR}.fsdp_config.param_offload": "actor parameters",
    f"{ACTOR}.fsdp_config.optimizer_offload": "actor optimizer",
}


@tries(*OFFLOADS)
@pytest.mark.parametrize("name", list(OFFLOADS))
def test_offload_moves_its_part_around_each_phase(shop: Shop, name: str, watched: Watched) -> None:
    off = [f"{other}=false" for other in OFFLOADS]
    shop.run("nothing_offloaded", *off)
    assert watched.moved.total() == 0
    run = shop.run(f"offloaded_{OFFLOADS[name].replace(' ', '_')}", *off, f"{name}=true")
    assert [part for part, count in watched.moved.items() if count > 2] == [OFFLOADS[name]]
    assert run.actor.actor.state_info()["offload_applies"] is False
    told = [sentence for sentence in run.said if "offload" in sentence]
    assert told == [f"{name}: no effect on a CPU, whose memory is the host's."]


# Rollout.


@tries(f"{ROLLOUT}.name")
def test_the_engine_is_the_one_named(shop: Shop, base: Finished) -> None:
    """Both draw the same tokens; native computes a prompt once for all its samples."""
    run = shop.run("hf", f"{ROLLOUT}.name=hf")
    assert isinstance(base.actor.rollout, NativeEngine)
    assert isinstance(run.actor.rollout, HFEngine)
    assert responses(run) == responses(base)
    n = DOCUMENT[f"{ROLLOUT}.n"]
    assert run.rows[0]["rollout/prefill_tokens"] == n * base.rows[0]["rollout/prefill_tokens"]


@tries(f"{ROLLOUT}.gpu_memory_utilization")
def test_the_share_of_memory_bounds_the_sequences_that_run_at_once(
    shop: Shop, base: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache row of this model takes 8 KiB: 2 layers, 2 heads of keys and values, 8 fp32 each, 32 tokens."""
    assert base.rows[0]["rollout/peak_running"] == SAMPLES
    monkeypatch.setattr(memory, "_host_available", lambda: 64 * 1024)
    for share, rows in ((1.0, 8), (0.5, 4)):
        run = shop.run(f"share_{share}", f"{ROLLOUT}.gpu_memory_utilization={share}")
        assert run.rows[0]["rollout/peak_running"] == rows
        assert run.rows[0]["rollout/cache_bytes"] == rows * 8192
        assert responses(run) == responses(base)
    with pytest.raises(EngineError, match="gpu_memory_utilization"):
        shop.run("share_0.1", f"{ROLLOUT}.gpu_memory_utilization=0.1")


@tries(f"{ROLLOUT}.n")
@pytest.mark.parametrize("n", [2, 5])
def test_every_prompt_gets_so_many_responses(shop: Shop, n: int) -> None:
    samples = shop.run(f"n_{n}", f"{ROLLOUT}.n={n}").samples(1)
    assert len(samples["tokens"]) == 4 * n
    assert all(samples["uid"].count(uid) == n for uid in samples["uid"])


@tries(f"{ROLLOUT}.temperature")
def test_the_temperature_is_that_of_sampling_and_of_training(shop: Shop, base: Finished) -> None:
    hot, cold = (shop.run(f"temperature_{t}", f"{ROLLOUT}.temperature={t}") for t in (1.5, 0.01))
    assert all(run.rows[0]["rollout/log_prob_diff_max"] < 1e-4 for run in (hot, base, cold))
    entropies = [run.rows[0]["actor/entropy"] for run in (hot, base, cold)]
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[-1] < 0.1 < 1 < entropies[0]


@tries(f"{ROLLOUT}.top_k", f"{ROLLOUT}.top_p")
def test_truncated_sampling(shop: Shop, base: Finished) -> None:
    """top_k beyond the vocabulary is no limit. One candidate left is the greedy one, which the validation
    takes too. The log-probs are those of the distribution that was cut."""
    unlimited = shop.run("top_k_-1", f"{ROLLOUT}.top_k=-1")
    assert responses(unlimited) == responses(base)
    assert flat(unlimited, 1, "rollout_log_probs")[0] == pytest.approx(flat(base, 1, "rollout_log_probs")[0])
    words = ("trainer.val_before_train=true", f"data.val_files={shop.train}", "data.shuffle=false")
    for word in (f"{ROLLOUT}.top_k=1", f"{ROLLOUT}.top_p=1e-6"):
        run = shop.run(word.rpartition(".")[2], *words, word)
        greedy = validated(run)["response_text"]
        samples = run.samples(1)
        assert samples["response_text"] == [greedy[row] for row in samples["index"]]
        assert not flat(run, 1, "rollout_log_probs")[0].any()
        assert (flat(run, 1, "rollout_log_probs_untruncated")[0] < -0.1).any()


PARALLEL = {
    f"{ACTOR}.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ROLLOUT}.tensor_model_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "trainer.n_gpus_per_node": "trainer.n_gpus_per_node",
    "trainer.nnodes": "trainer.nnodes",
}


@tries(*PARALLEL)
@pytest.mark.parametrize("name", list(PARALLEL))
def test_devices_that_are_not_there_are_refused(shop: Shop, name: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        shop.run("parallel", f"{name}=2")
    (error,) = caught.value.errors
    assert error.field == name
    assert "one process" in str(error.expected)
    assert f"{name}=1" in str(error.remedy)
    assert not (shop.folder / "parallel").exists()


# The run.


@tries("trainer.logger")
def test_loggers(shop: Shop, base: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step 1/1" not in capsys.readouterr().out
    assert not (base.folder / "tensorboard").exists()
    run = shop.run("loggers", f"trainer.logger={DOCUMENT['trainer.logger']}")
    assert "step 1/1" in capsys.readouterr().out
    (events,) = (run.folder / "tensorboard").iterdir()
    assert b"actor/kl_loss" in events.read_bytes()


@tries("trainer.project_name", "trainer.experiment_name")
def test_the_names_make_the_run_folder(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for project, experiment in (("p", "a"), ("p", "b"), ("q", "a")):
        shop.run("unused", f"trainer.project_name={project}", f"trainer.experiment_name={experiment}",
                 "trainer.default_local_dir=runs/${trainer.project_name}/${trainer.experiment_name}")  # fmt: skip
        assert (tmp_path / "runs" / project / experiment / "metrics.jsonl").is_file()


@tries("trainer.save_freq")
@pytest.mark.parametrize(("frequency", "steps"), [(1, [1, 2, 3]), (2, [2, 3]), (50, [3]), (-1, [])])
def test_saves_come_every_so_many_steps_and_at_the_end(
    shop: Shop, frequency: int, steps: list[int]
) -> None:
    run = shop.run(f"save_{frequency}", f"trainer.save_freq={frequency}", "trainer.total_training_steps=3")
    names = sorted(os.listdir(run.folder / "checkpoints"))
    assert names == [f"step_{step:06d}" for step in steps]


@tries("trainer.test_freq")
@pytest.mark.parametrize(("frequency", "steps"), [(2, [2, 3]), (-1, [])])
def test_validations_come_every_so_many_steps_and_at_the_end(
    shop: Shop, frequency: int, steps: list[int]
) -> None:
    run = shop.run(f"test_{frequency}", f"trainer.test_freq={frequency}", "trainer.total_training_steps=3")
    assert [row["step"] for row in run.rows if "val/accuracy" in row] == steps


@tries("trainer.total_epochs")
@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_make_the_steps(shop: Shop, epochs: int) -> None:
    data = write_rows(shop.folder / "nine.parquet", [problem(3, b) for b in range(9)])
    run = shop.run(f"epochs_{epochs}", f"data.train_files={data}", f"trainer.total_epochs={epochs}",
                   "trainer.total_training_steps=null")  # fmt: skip
    assert [row["training/epoch"] for row in run.rows] == [0, 0, 1, 1][: 2 * epochs]


def test_every_key_of_the_command_line_has_been_tried() -> None:
    assert set(DOCUMENT) == TRIED
