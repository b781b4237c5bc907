import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tandem.trainer.planning import worst_batch
from tests.support.runs import assert_same

PPO = "GAE trainer.device=cpu"


def generators():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


def state(engine):
    moments = [whole(t) for slots in engine._state._slots.values() for t in slots.values()]
    weights = {name: whole(value) for name, value in engine.weights()}
    return weights, moments, [p.grad for p in engine.module.parameters()], engine.version


def test_nothing_is_changed_by_it(lab):
    done = lab.run("once", PPO)
    config = lab.config(PPO, "trainer.worst_batch_first=true")
    roles, ran = done.trainer.roles, []
    for group, section in ((roles.actor, config.actor_rollout_ref.actor), (roles.critic, config.critic)):
        worker: Any = group._workers._worker
        engine = worker.trained()
        engine.module.register_forward_pre_hook(lambda _, inputs: ran.append(len(inputs[0].input_ids)))
        before, drawn = state(engine), generators()
        _, moments, gradients, version = before
        assert moments and set(gradients) == {None} and version > 0
        worker.run_worst_batch(worst_batch(config, section, 1))
        assert state(engine) == before and generators() == drawn
    # 4 prompts with 3 responses, 8 + 6 tokens; the last is never an input. Each engine first measures what
    # its layers keep.
    assert ran == [12 * 13] * 4


def test_a_run_is_the_same_with_and_without_it(lab):
    keys = {on: f"trainer.worst_batch_first={on}" for on in ("true", "false", "null")}
    runs = [lab.run(f"first_{on}", PPO, key) for on, key in keys.items()]
    first, *others = runs
    assert ["largest batch ran" in run.log for run in runs] == [True, False, False]  # null: only on CUDA
    for other in others:
        assert_same(first, other)
        assert first.samples(2)["tokens"] == other.samples(2)["tokens"]


@pytest.mark.parametrize(
    ("words", "ranks", "expected"),
    [
        ("", 1, (12, 14, False)),
        ("A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=60", 1, (4, 14, True)),
        ("A.use_dynamic_bsz=false A.ppo_micro_batch_size_per_gpu=5", 1, (5, 14, True)),
        ("A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=60", 4, (3, 14, False)),
    ],
)
def test_the_largest_micro_batch(lab, words, ranks, expected):
    config = lab.config(words)
    assert worst_batch(config, config.actor_rollout_ref.actor, ranks)[:3] == expected


def test_two_run_where_an_update_has_several(lab):
    words = "A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=60 trainer.device=cpu"
    done = lab.run("several", words, "trainer.worst_batch_first=true")
    assert "actor: the largest batch ran before the first step: 2 × 56 tokens" in done.log
