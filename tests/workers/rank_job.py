"""A job for several ranks. Arguments: the NAME of a function below, FOLDER of models, RESULTS to write."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tandem.engines.weight_sync import WeightSyncError, buckets, digest
from tandem.models.parallel import leave_distributed
from tandem.workers import actor_part
from tests.workers import roles
from tests.workers.streamed import FAULTS, NAME, StreamedEngine

LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.name=native")
TENSOR = ("actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=2")


def all_roles(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return roles.program(roles.Team(roles.make_config(folder), rank, world))


def lora(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return {"sharded": train_lora(folder, rank, ()), "tensor": train_lora(folder, rank, TENSOR)}


def train_lora(folder: Path, rank: int, words: tuple[str, ...]) -> dict[str, Any]:
    """Take two updates; return how far rollouts are from the actor, and the generated tokens."""
    worker = roles.make_actor(roles.make_config(folder, *LORA, *words), *roles.ALL, rank=rank, world=2)
    prompts = roles.make_prompts(4).chunk(2)[rank]
    found: dict[str, Any] = {"engines": sorted(worker.engines), "gaps": [], "tokens": []}
    for _ in range(3):
        batch = worker.generate_sequences(prompts, 2, roles.PARAMS)
        whole = roles.gathered(batch)
        found["tokens"].append([part.ragged("tokens").values.tolist() for part in whole])
        mine = batch if worker.actor.share.size == 2 else type(batch).concat(whole)
        found["gaps"].append(roles.gap(roles.learn(worker, mine, reference=True)))
    return found


class Ranks:
    """An actor on two ranks, and its weights before its first update."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.config, self.rank = roles.make_config(folder, "actor_rollout_ref.rollout.name=hf"), rank
        self.worker = roles.make_actor(self.config, "actor", "rollout", rank=rank, world=2)
        self.prompts = roles.make_prompts(3).chunk(2)[rank]
        batch = self.generate()
        self.old = {name: value.clone() for name, value in self.worker.actor.weights()}
        roles.learn(self.worker, batch)

    def generate(self, worker: Any = None) -> Any:
        return (worker or self.worker).generate_sequences(self.prompts, 2, roles.PARAMS)

    def raised(self, call: Callable[[], Any]) -> list[str]:
        found = "nothing"
        try:
            call()
        except WeightSyncError as error:
            found = f"{error.field}: {error.got}"
        return roles.gathered(found)

    def stale_gather(self) -> list[str]:
        layer = self.worker.actor.module.decoder.layers[1]
        original = type(layer).unshard

        def stale(unit: Any, *args: Any, **options: Any) -> None:
            original(unit, *args, **options)
            if unit is layer and self.rank == 1:
                layer.self_attn.k_proj.weight.data.copy_(self.old[NAME])

        with patch.object(type(layer), "unshard", stale):
            return self.raised(self.generate)

    def streamed(self) -> dict[str, list[Any]]:
        part, shared = self.worker.parts["rollout"], self.generate()
        path, dtype = self.config.actor_rollout_ref.model.path, self.worker.actor.compute_dtype
        engine, part.engine = part.engine, StreamedEngine(path, dtype)
        found = {}
        for name, (fault, _) in FAULTS.items():
            part.engine.fault = fault
            found[name] = self.raised(self.generate)
        part.engine.fault = None
        found["none"] = roles.gathered(same(self.generate(), shared))
        part.engine = engine
        return found

    def apart(self) -> dict[str, Any]:
        """Send buckets of several tensors to a rollout of two ranks, first without one bucket, then all."""
        found: dict[str, Any] = {"count": self.worker.weight_buckets()}
        for name, left_out in (("left out", 1), ("whole", None)):
            other = roles.make_actor(self.config, "rollout", rank=self.rank, world=2)
            found[name] = self.raised(lambda: roles.broadcast(self.worker, other, left_out))  # noqa: B023
        return found | {"same": roles.gathered(same(self.generate(other), self.generate()))}


def same(first: Any, second: Any) -> bool:
    return bool(first.ragged("tokens").equal(second.ragged("tokens")))


def weight_sync(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Sync weights in all three ways, without and with faults, and record what each rank raised."""
    actor_part.buckets = lambda sizes, limit: buckets(sizes, 8192)  # 1 MiB would hold the whole model
    ranks = Ranks(folder, rank)
    actor, half = ranks.worker.actor, torch.bfloat16
    whole, whole_half = digest(actor.weights()), digest(actor.weights(dtype=half))
    return {
        "digests": roles.gathered((actor.digest() == whole, actor.digest(half) == whole_half)),
        "stale gather": ranks.stale_gather(),
        "shared": ranks.raised(ranks.generate),
        "streamed": ranks.streamed(),
        "apart": ranks.apart(),
    }


def main() -> None:
    name, folder, results = sys.argv[1:]
    rank, job = int(os.environ["RANK"]), {job.__name__: job for job in (all_roles, lora, weight_sync)}[name]
    record = job(Path(folder), rank, int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
