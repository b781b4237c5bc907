"""Workers over tiny models, alone or as the ranks of a job, and one program that uses all of them."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.errors import NonFiniteError
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.runtime.worker import create
from tandem.workers.actor import ActorWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.reward_model import RewardModelWorker
from tests.support.ranks import run_ranks
from tests.support.tiny import CHARACTERS, make_model, write_problems

N = 2
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, stop_token_ids=(1,), seed=3)
ALL = ("actor", "rollout", "ref")


def make_folder(folder: Path) -> Path:
    """Create a policy, a reward model with the same tokens, and data files that are not read."""
    make_model(folder / "model")
    write_problems(folder)
    torch.manual_seed(5)
    config = Qwen2Config.from_pretrained(folder / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scorer")
    return folder


def make_config(folder: Path, *words: str, run: Path | None = None) -> TrainConfig:
    actor = "actor_rollout_ref.actor"
    sections = (actor, "actor_rollout_ref.ref", "critic", "reward_model")
    several = any(word.startswith("reward_model.models=") for word in words)
    scorer = "" if several else f"reward_model.model.path={folder}/scorer"
    keys = f"""
        algorithm.adv_estimator=gae data.train_files={folder}/train.parquet data.train_batch_size=4
        data.max_prompt_length=8 data.max_response_length=6 actor_rollout_ref.model.path={folder}/model
        {scorer} reward_model.enable=true trainer.device=cpu
        {actor}.ppo_mini_batch_size=4 {actor}.ppo_micro_batch_size_per_gpu=2 {actor}.use_kl_loss=true
        {actor}.optim.lr=0.01 critic.optim.lr=0.01 trainer.default_local_dir={run or folder / "run"}"""
    exact = [f"{section}.fsdp_config.model_dtype=fp64" for section in sections]
    return load_train_config(None, [*keys.split(), *exact, *words]).config


def tokenizer_of(config: TrainConfig) -> Any:
    return AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)


def factory_of(worker: Any, section: Any, config: TrainConfig, **more: Any) -> Any:
    run = RunFolder(config.trainer.default_local_dir)
    return functools.partial(worker, section, device="cpu", run=run, **more)


def actor_factory(config: TrainConfig, *parts: str) -> Any:
    more = {"total_steps": 10, "updates_per_step": 1, "recompute_old": True, "parts": frozenset(parts)}
    return factory_of(ActorWorker, config, config, tokenizer=tokenizer_of(config), **more)


def make_actor(config: TrainConfig, *parts: str, rank: int = 0, world: int = 1) -> Any:
    return create(actor_factory(config, *parts), rank, world)


def make_critic(config: TrainConfig, *, rank: int = 0, world: int = 1) -> Any:
    more = {"norm_length": 6, "total_steps": 10, "updates_per_step": 1, "collective_timeout_s": 60}
    seed = config.trainer.seed
    return create(factory_of(CriticWorker, config.critic, config, seed=seed, **more), rank, world)


def scorer_factory(config: TrainConfig, **more: Any) -> Any:
    settings = {"tokenizer": tokenizer_of(config), "collective_timeout_s": 60, **more}
    return factory_of(RewardModelWorker, config.reward_model, config, **settings)


def make_scorer(config: TrainConfig, *, rank: int = 0, world: int = 1) -> Any:
    return create(scorer_factory(config), rank, world)


def make_prompts(count: int) -> DataProto:
    draw = np.random.default_rng(count)
    rows = [draw.integers(3, 3 + len(CHARACTERS), size=size) for size in draw.integers(2, 9, size=count)]
    return DataProto(
        {"prompts": Ragged.from_list([torch.from_numpy(row) for row in rows], torch.int64)},
        {"uid": [f"prompt {i}" for i in range(count)], "index": list(range(count))},
    )


def with_targets(batch: DataProto) -> DataProto:
    """Add advantages and returns that depend only on each sample's tokens."""
    tokens = batch.ragged("tokens")
    noise_T = torch.sin(tokens.values.double() + tokens.positions())
    columns = {"advantages": tokens.with_values(noise_T), "returns": tokens.with_values(2 * noise_T)}
    return batch.union(DataProto(columns))


def with_log_probs(worker: Any, batch: DataProto, *, reference: bool = False) -> DataProto:
    """Add targets and the actor's log-probs; without a reference, also as those of a reference."""
    old = worker.compute_log_prob(batch)
    ref = worker.compute_ref_log_prob(batch) if reference else old.rename("old_log_probs", "ref_log_probs")
    return with_targets(batch).union(old, ref)


def learn(worker: Any, batch: DataProto, *, reference: bool = False) -> DataProto:
    """Take one update, and return the batch with its log-probs before the update."""
    batch = with_log_probs(worker, batch, reference=reference)
    worker.update_actor(batch)
    return batch


def gap(batch: DataProto) -> float:
    names = ("rollout_log_probs", "old_log_probs")
    sampled, trained = (batch.ragged(name).values[batch.ragged("response_mask").values] for name in names)
    return float((sampled - trained).abs().max())


def versions(batch: DataProto) -> set[int]:
    return set(batch.ragged("policy_version").values[batch.ragged("response_mask").values].tolist())


def transfer(actor: Any, apart: Any, change: Any = lambda bucket: bucket) -> None:
    for number in range(actor.weight_buckets()):
        apart.load_weights(change(actor.export_weights(number)))


def broadcast(actor: Any, apart: Any, left_out: int | None = None) -> None:
    """Send the weights of the first rank's actor to the rollouts of all ranks, except one bucket."""
    for number in range(actor.weight_buckets()):
        bucket = [actor.export_weights(number)]
        dist.broadcast_object_list(bucket)
        if number != left_out:
            apart.load_weights(bucket[0])


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Team:
    """All roles of one rank; `count` is the number of prompts of all ranks, which share them evenly."""

    def __init__(self, config: TrainConfig, rank: int, world: int) -> None:
        self.config = config
        self.rank, self.world = rank, world
        self.actor = make_actor(config, *ALL, rank=rank, world=world)
        self.critic = make_critic(config, rank=rank, world=world)
        self.scorer = make_scorer(config, rank=rank, world=world)

    def prompts(self, count: int) -> DataProto:
        return make_prompts(count).chunk(self.world)[self.rank]

    def step(self, count: int) -> dict[str, Any]:
        batch = self.actor.generate_sequences(self.prompts(count), N, PARAMS)
        made = [self.actor.compute_log_prob(batch), self.actor.compute_ref_log_prob(batch)]
        made += [self.critic.compute_values(batch), self.scorer.compute_rm_score(batch)]
        batch = with_targets(batch.union(*made))
        metrics = {"actor": self.actor.update_actor(batch).to_floats()}
        metrics["critic"] = self.critic.update_critic(batch).to_floats()
        workers = (self.actor, self.critic, self.scorer)
        observed = gathered(Metrics.merged(worker.take_observed() for worker in workers))
        return {
            "batch": DataProto.concat(gathered(batch)),
            "metrics": metrics,
            "observed": Metrics.merged(observed).to_floats(),
            "observed by rank": [metrics.to_floats() for metrics in observed],
        }

    def weights(self) -> dict[str, Any]:
        actor = {f"actor {name}": value.clone() for name, value in self.actor.actor.weights()}
        return actor | {f"critic {name}": value.clone() for name, value in self.critic.engine.weights()}

    def streamed(self, count: int) -> list[tuple[list[int], bool]]:
        """Abandon a stream; for each rank, return the sizes of another's parts, and if its rows are right."""
        prompts = self.prompts(count)
        whole = self.actor.generate_sequences(prompts, N, PARAMS)
        left = self.actor.stream_sequences(prompts, N, PARAMS)
        next(left, None)
        left.close()
        parts = list(self.actor.stream_sequences(prompts, N, PARAMS))
        rows = [row for part in parts for row in part.rows]
        same = sorted(rows) == list(range(len(whole)))
        if parts:
            found = DataProto.concat([part.batch for part in parts])[np.argsort(rows).tolist()]
            same = same and equal(found, whole)
        return gathered(([len(part.batch) for part in parts], same))

    def moved(self, count: int) -> bool:
        """Return whether a separate rollout with the actor's weights generates the same as the actor's."""
        apart = make_actor(self.config, "rollout", rank=self.rank, world=self.world)
        before = apart.generate_sequences(self.prompts(count), N, PARAMS)
        broadcast(self.actor, apart)
        found = apart.generate_sequences(self.prompts(count), N, PARAMS)
        wanted = self.actor.generate_sequences(self.prompts(count), N, PARAMS)
        same, unchanged = all(gathered(equal(found, wanted))), all(gathered(equal(before, wanted)))
        return same and not unchanged and apart.engines["rollout"].version == self.actor.actor.version

    def non_finite(self, batch: DataProto) -> list[tuple[str, str, DataProto]]:
        """Spoil the last rank's share; return each rank's field of the error, and the saved file."""
        share = batch.chunk(self.world)[self.rank]
        advantages = share.ragged("advantages")
        if self.rank == self.world - 1:
            share.batch["advantages"] = advantages.with_values(advantages.values * float("nan"))
        with pytest.raises(NonFiniteError) as caught:
            self.actor.update_actor(share)
        path = Path(str(caught.value.remedy).split("'")[1])
        return gathered((str(caught.value.field), path.name, DataProto.load(path)))


def equal(first: DataProto, second: DataProto) -> bool:
    if set(first.columns) != set(second.columns):
        return False
    for name, column in first.batch.items():
        ragged = isinstance(column, Ragged)
        if not (column.equal(second.ragged(name)) if ragged else torch.equal(column, second.dense(name))):
            return False
    arrays = second.non_tensor_batch
    return all(list(array) == list(arrays[name]) for name, array in first.non_tensor_batch.items())


def program(team: Team) -> dict[str, Any]:
    """Run everything. With 7 and 3 prompts, some of four ranks have fewer prompts or none."""
    first = team.step(7)
    record = {"first": first, "second": team.step(3), "weights": team.weights()}
    record |= {"streamed": team.streamed(7), "streamed few": team.streamed(3), "moved": team.moved(3)}
    record["non_finite"] = team.non_finite(first["batch"])
    record["after"] = team.weights()
    return record


def on_ranks(job: str, folder: Path, ranks: int) -> Any:
    """Run a function of rank_job.py on several ranks, and return what the first rank found."""
    results = folder / f"{job}.pt"
    run_ranks(Path(__file__).with_name("rank_job.py"), job, folder, results, ranks=ranks)
    return torch.load(results, weights_only=False)
