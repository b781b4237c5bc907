"""The work of a step and the fit of factors, against slow reference implementations."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.errors import DataError
from tandem.memory.device_file import add_observation, read_devices
from tandem.memory.seconds import Rates, Work, decode_steps, fit, forecast, predict, step_work
from tandem.memory.shapes import model_shape
from tests.support.words import words as full_words

STORED = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 50}
STORED |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = model_shape(STORED)
RATES = Rates(1e9, 1e8)


def config(tmp_path: Path, *words: str) -> TrainConfig:
    (tmp_path / "config.json").write_text(json.dumps(STORED))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    own = full_words(
        f"M.path={tmp_path} D.train_files={tmp_path / 'rows.jsonl'} G.adv_estimator=grpo R.n=2",
        "D.train_batch_size=4 A.ppo_mini_batch_size=2 A.use_dynamic_bsz=true",
        "A.ppo_max_token_len_per_gpu=1024 M.enable_gradient_checkpointing=false",
    )
    return load_train_config(None, [*own, *full_words(*words)]).config


def test_operations_are_those_that_torch_counts(tmp_path):
    model = AutoModelForCausalLM.from_config(Qwen2Config(**STORED, tie_word_embeddings=False))
    assert SHAPE.matrices + SHAPE.embedding == sum(
        p.numel() for n, p in model.named_parameters() if n.endswith(("proj.weight", "lm_head.weight"))
    )
    prompts, responses = np.array([10] * 4), np.array([20] * 8)
    work = step_work(config(tmp_path), SHAPE, prompts, responses, item=4)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, math:
        model.model(torch.zeros(8, 30, dtype=torch.int64))
    whole = counter.get_total_flops()
    causal = 3 * 4 * 2 * 8 * 30 * 30 * 32  # torch counts the whole square of scores, of which half is needed
    head = 2 * 32 * 50 * 20 * 8
    assert work["old_log_prob"].operations == pytest.approx(whole - causal / 4 + head, rel=1e-6)
    forward = work["old_log_prob"].operations
    assert work["update_actor"].operations == pytest.approx(3 * (forward - head) + 4 * head)
    assert work["update_actor"].tokens == 240 and work["update_actor"].samples == 8


def test_decoding_counts_steps_and_contexts_token_by_token(tmp_path):
    prompts, responses = np.array([3, 5]), np.array([4, 7, 2, 9])
    whole = config(tmp_path, "actor_rollout_ref.rollout.max_num_seqs=3", "data.train_batch_size=2")
    work = step_work(whole, SHAPE, prompts, responses, item=2)["generate_sequences"]
    contexts = sum(p + t + 0.5 for p, r in zip((3, 3, 5, 5), responses, strict=True) for t in range(r))
    steps = 11 + 1  # the fourth starts when the third, with two tokens, ends; one step more for the prompts
    assert work.calls == 3 * steps and work.tokens == 22 and work.samples == 4
    weights = 2 * steps * (SHAPE.matrices + SHAPE.embedding)
    assert work.bytes == pytest.approx(weights + 2 * 2 * 3 * 2 * 8 * contexts)


@pytest.mark.parametrize("slots", [1, 2, 5, 40])
def test_decode_steps_against_a_step_by_step_simulation(slots):
    lengths = np.random.default_rng(slots).integers(1, 30, 33).tolist()
    waiting, running, steps = list(lengths), list[int](), 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    assert decode_steps(lengths, slots) == steps


def test_phases_follow_the_config(tmp_path):
    sizes = np.array([10] * 4), np.array([20] * 8)
    one = step_work(config(tmp_path, "actor_rollout_ref.actor.ppo_mini_batch_size=4"), SHAPE, *sizes, item=4)
    assert "old_log_prob" not in one and "ref" not in one and "values" not in one
    words = "G.adv_estimator=gae A.use_kl_loss=true critic.ppo_mini_batch_size=4"
    ppo = step_work(config(tmp_path, words), SHAPE, *sizes, item=4)
    assert ppo["ref"].operations == ppo["old_log_prob"].operations > ppo["values"].operations
    assert ppo["update_critic"].calls == 3 * 3 and ppo["update_actor"].calls == 2 * 3 * 3
    again = config(tmp_path, "M.enable_gradient_checkpointing=true")
    full = config(tmp_path, "M.enable_gradient_checkpointing=true M.gradient_checkpointing_mode=full")
    before, after = (step_work(each, SHAPE, *sizes, item=4)["update_actor"] for each in (again, full))
    head = 2 * 32 * 50 * 160
    more = one["update_actor"].operations / 3 - head * 4 / 3
    assert after.operations - before.operations == pytest.approx(more)


def test_floor_is_the_longer_of_the_two():
    assert Work(operations=2e9, bytes=1e8).floor(RATES) == 2
    assert Work(operations=2e9, bytes=3e8).floor(RATES) == 3


def test_fit_finds_the_factors_that_made_the_seconds(tmp_path):
    rng = np.random.default_rng(0)
    factors = [1.4, 0.0, 3e-4, 2e-6, 0.0]
    work = [Work(*(rng.uniform(0.1, 10, 5) * (1e9, 1e8, 1e4, 1e6, 1e2))) for _ in range(30)]
    seconds = [float(each.terms(RATES) @ np.array(factors)) for each in work]
    noisy = [s * rng.normal(1, 0.01) for s in seconds]
    found = fit(list(zip(work, noisy, strict=True)), RATES)
    assert found[1] == found[4] == 0  # terms that explain nothing are left out
    assert found == pytest.approx(factors, rel=0.05)
    alone = fit([(work[0], 7.0)], RATES)
    assert sum(each > 0 for each in alone) == 1
    assert float(work[0].terms(RATES) @ np.array(alone)) == pytest.approx(7)


def test_prediction_adds_phases_up():
    work = {"a": Work(operations=2e9), "b": Work(bytes=1e8)}
    phases = predict(work, RATES, {"a": [1.5, 0, 0, 0, 0]})
    assert phases == {"a": 3.0, "b": 2.0, "step": 5.0}  # without factors, twice the floor
    found = forecast(phases, tokens=1000, steps=7200, devices=4)
    days = pytest.approx(10 / 24)
    assert found == {"phases": phases, "tokens_per_s": 200, "days": days, "device_hours": 40}


def test_the_file_of_devices_keeps_the_newest_of_a_run(tmp_path):
    path = tmp_path / "deep" / "device.json"
    assert read_devices(path) == {}
    work = Work(operations=1e9)
    add_observation(path, "cpu", RATES, 4, "one", {"a": (work, 2.0)})
    known = add_observation(path, "cpu", RATES, 4, "one", {"a": (work, 3.0)})
    add_observation(path, "gpu", Rates(1e12, 1e12), 2, "one", {"a": (work, 0.5)})
    there = read_devices(path)
    assert there["cpu"] == known and known.factors == {"a": [pytest.approx(3), 0, 0, 0, 0]}
    assert (there["gpu"].rates, there["gpu"].item) == (Rates(1e12, 1e12), 2)
    for other in ('{"format": 9}', "[]", '{"format": 1, "devices": {"cpu": {"rates": {}}}}'):
        path.write_text(other)
        with pytest.raises(DataError, match="not a file of measured devices"):
            read_devices(path)


def test_prediction_needs_no_torch():
    code = "import sys, tandem.bench.prediction; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_devices_share_the_work_and_split_layers_their_weights(tmp_path):
    sizes = np.array([10] * 4), np.array([20] * 8)
    one = step_work(config(tmp_path), SHAPE, *sizes, item=4)
    two = step_work(config(tmp_path, "trainer.n_gpus_per_node=2"), SHAPE, *sizes, item=4)
    words = "T.n_gpus_per_node=2 R.tensor_model_parallel_size=2 FS.tensor_parallel_size=2"
    split = step_work(config(tmp_path, words), SHAPE, *sizes, item=4)
    weights = 4 * (SHAPE.matrices + SHAPE.embedding)
    for phase in ("generate_sequences", "old_log_prob", "update_actor"):
        assert two[phase].operations == split[phase].operations == pytest.approx(one[phase].operations / 2)
    decode = [each["generate_sequences"].bytes for each in (one, two, split)]
    assert decode[1] - decode[2] == pytest.approx(21 * weights / 2)  # as many steps of half the work
    assert one["old_log_prob"].bytes - 2 * split["old_log_prob"].bytes == pytest.approx(0)
    uneven = step_work(config(tmp_path, words), SHAPE, sizes[0], np.array([20] * 7 + [30]), item=4)
    assert uneven["generate_sequences"].calls == split["generate_sequences"].calls + 10 * SHAPE.decoder.layers
    adapters = config(tmp_path, "actor_rollout_ref.model.lora_rank=2")
    saved = one["update_actor"].bytes - step_work(adapters, SHAPE, *sizes, item=4)["update_actor"].bytes
    few = 3 * 2 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 3 * (32 + 80))  # of the seven matrices
    assert saved == pytest.approx(2 * 40 * (weights / 4 - few) + 2 * weights)
