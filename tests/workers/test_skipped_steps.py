from pathlib import Path

import pytest
import torch

from tandem.config.data import DataConfig
from tandem.errors import DataError, NonFiniteError
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, SamplingParams
from tandem.workers.data import DataFacts, DataWorker
from tests.support.tiny import make_tokenizer, write_problems
from tests.workers import roles

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
ACTOR, CRITIC = "actor_rollout_ref.actor.optim", "critic.optim"


class Policy:
    def __init__(self, folder: Path, run: Path, role: str, *words: str) -> None:
        config = roles.make_config(folder, *words, run=run)
        actor = roles.make_actor(config, "actor", "rollout")
        batch = actor.generate_sequences(roles.make_prompts(4), 1, GREEDY)
        self.batch = roles.with_log_probs(actor, batch)
        self.worker, self.update, self.column = actor, actor.update_actor, "advantages"
        if role == "critic":
            critic = roles.make_critic(config)
            self.batch = self.batch.union(critic.compute_values(self.batch))
            self.worker, self.update, self.column = critic, critic.update_critic, "returns"
        self.engine = self.worker.engines[role]
        self.said: list[str] = []
        self.worker.tell = lambda said: self.said.append(said) if "recomputation" not in said else None

    def step(self, *, bad: bool) -> dict[str, float]:
        columns = dict(self.batch.batch)
        if bad:
            given = self.batch.ragged(self.column)
            columns[self.column] = given.with_values(given.values * float("nan"))
        return self.update(DataProto(columns)).to_floats()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"weight {name}": value.clone() for name, value in self.engine.weights()}
        for optimizer in self.engine._state.optimizers:
            for number, slots in enumerate(optimizer.state.values()):
                found |= {f"{number} {name}": value.clone() for name, value in slots.items()}
        return found


def same(first, second):
    assert set(first) == set(second)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("role", "at"), [("actor", ACTOR), ("critic", CRITIC)])
def test_a_skipped_step_changes_nothing_and_is_reported(folder, tmp_path, role, at):
    policy = Policy(folder, tmp_path, role, f"{at}.skip_non_finite_steps=2", f"{at}.lr_warmup_steps=4")
    assert policy.step(bad=False)["skipped_steps"] == 0
    before = policy.state()
    assert [policy.step(bad=True) for _ in range(2)] == [{"skipped_steps": 1}, {"skipped_steps": 2}]
    assert policy.engine.version == 1 and same(policy.state(), before)
    paths = [tmp_path / "log" / f"{role}_update_1{again}_rank_0.pt" for again in ("", "_again_1")]
    for count, (path, sentence) in enumerate(zip(paths, policy.said, strict=True), 1):
        assert sentence.startswith(f"{role} update 1: ") and f"({count} in a row, 2 allowed)" in sentence
        assert f"DataProto.load('{path}')" in sentence
    assert all(DataProto.load(path).ragged(policy.column).values.isnan().any() for path in paths)
    after = policy.step(bad=False)  # the second step of the schedule, not the fourth
    assert (after["skipped_steps"], after["lr"]) == (2, 0.01 / 4)
    assert policy.engine.version == 2 and not same(policy.state(), before)


def test_a_run_with_skipped_steps_goes_on_as_one_without(folder, tmp_path):
    words = "actor", f"{ACTOR}.skip_non_finite_steps=1"
    first, second = (Policy(folder, tmp_path / name, *words) for name in ("a", "b"))
    for bad in (False, True, False, True, False):  # never two in a row
        first.step(bad=bad)
        if not bad:
            second.step(bad=False)
    assert same(first.state(), second.state())
    assert len(first.said) == 2 and second.said == []


@pytest.mark.parametrize("allowed", [0, 1])
def test_more_in_succession_than_allowed_end_the_run(folder, tmp_path, allowed):
    words = [f"{ACTOR}.skip_non_finite_steps=1"] * allowed
    policy = Policy(folder, tmp_path, "actor", *words)
    assert ("skipped_steps" in policy.step(bad=False)) == bool(allowed)
    for _ in range(allowed):
        policy.step(bad=True)
    before = policy.state()
    with pytest.raises(NonFiniteError) as caught:
        policy.step(bad=True)
    assert caught.value.field == "actor update 1"
    assert f"actor_update_1{'_again_1' * allowed}_rank_0.pt" in str(caught.value.remedy)
    assert same(policy.state(), before) and len(policy.said) == allowed


def config(folder, **changes):
    train, val = write_problems(folder)
    given = {"train_files": (str(train),), "val_files": (str(val),), "train_batch_size": 5, "seed": 3}
    return DataConfig.model_validate(given | changes)


def test_batches_are_functions_of_their_numbers(tmp_path):
    settings, run = config(tmp_path, val_batch_size=3), RunFolder(tmp_path / "run")
    worker, again = (DataWorker(settings, make_tokenizer(tmp_path), run) for _ in range(2))
    facts = worker.describe()
    assert facts == DataFacts(24, 3, facts.digest, sources=("arithmetic",), longest_prompt=5)
    assert facts.digest == again.describe().digest
    epoch = [worker.train_batch(number).non_tensor_batch["uid"].tolist() for number in range(8)]
    assert len({uid for batch in epoch for uid in batch}) == 40
    for number in (6, 2, 2, 7):
        assert again.train_batch(number).non_tensor_batch["uid"].tolist() == epoch[number]
    uids = [uid for number in range(3) for uid in worker.val_batch(number).non_tensor_batch["uid"]]
    assert uids == [f"val-{row}" for row in range(8)]
    assert worker.take_timings()["timing/data"] > 0
    settings = config(tmp_path, val_files=())
    assert DataWorker(settings, make_tokenizer(tmp_path), run).describe().val_batches == 0


def test_data_that_are_refused_leave_no_trace(tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(DataError, match="do not fill one batch"):
        DataWorker(config(tmp_path, train_batch_size=25), make_tokenizer(tmp_path), run)
    assert not run.timeline_file.exists()
    run.remove_if_unused()
    assert not run.path.exists()
