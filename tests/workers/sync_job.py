"""A job for two ranks. Arguments: FOLDER of models, RESULTS to write.

It syncs weights in all three ways, without and with faults, and records what each rank raised for each fault.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.engines.weight_sync import WeightSyncError, buckets, digest
from tandem.models.parallel import leave_distributed
from tandem.workers import actor_part
from tests.workers import roles
from tests.workers.streamed import FAULTS, NAME, StreamedEngine


class Ranks:
    """An actor on two ranks, its first batch, and its weights at that time."""

    def __init__(self, config: Any, rank: int) -> None:
        self.config, self.rank = config, rank
        self.worker = roles.make_actor(config, "actor", "rollout", rank=rank, world=2)
        self.prompts = roles.make_prompts(3).chunk(2)[rank]
        self.batch = self.generate()
        self.old = {name: value.clone() for name, value in self.worker.actor.weights()}

    def generate(self, worker: Any = None) -> Any:
        return (worker or self.worker).generate_sequences(self.prompts, 2, roles.PARAMS)

    def learn(self) -> None:
        batch = roles.with_targets(self.batch)
        old = self.worker.compute_log_prob(batch)
        self.worker.update_actor(batch.union(old, old.rename("old_log_probs", "ref_log_probs")))

    def raised(self, call: Callable[[], Any]) -> list[str]:
        """Return the error of each rank."""
        found = "nothing"
        try:
            call()
        except WeightSyncError as error:
            found = f"{error.field}: {error.got}"
        return self.gathered(found)

    def gathered(self, value: Any) -> list[Any]:
        values = [None] * 2
        dist.all_gather_object(values, value)
        return values

    def stale_gather(self) -> list[str]:
        """Let the second rank gather a layer's old weights."""
        layer = self.worker.actor.module.decoder.layers[1]
        original = type(layer).unshard

        def stale(unit: Any, *args: Any, **options: Any) -> None:
            original(unit, *args, **options)
            if unit is layer and self.rank == 1:
                layer.self_attn.k_proj.weight.data.copy_(self.old[NAME])

        type(layer).unshard = stale
        try:
            return self.raised(self.generate)
        finally:
            type(layer).unshard = original

    def streamed(self) -> dict[str, list[str]]:
        """Try all faults of streams, then a correct stream."""
        engine, shared = self.worker.parts["rollout"].engine, self.generate()
        path, dtype = self.config.actor_rollout_ref.model.path, self.worker.actor.compute_dtype
        self.worker.parts["rollout"].engine = StreamedEngine(path, dtype)
        found = {}
        for name, (fault, _) in FAULTS.items():
            self.worker.parts["rollout"].engine.fault = fault
            found[name] = self.raised(self.generate)
        self.worker.parts["rollout"].engine.fault = None
        found["none"] = self.gathered(str(same(self.generate(), shared)))
        self.worker.parts["rollout"].engine = engine
        return found

    def apart(self) -> dict[str, list[str]]:
        """Send buckets of several tensors to a rollout of two ranks, first without one bucket, then all."""
        other = roles.make_actor(self.config, "rollout", rank=self.rank, world=2)

        def send(left_out: int | None) -> None:
            for number in range(self.worker.weight_buckets()):
                bucket = [self.worker.export_weights(number)]
                dist.broadcast_object_list(bucket)
                if number != left_out:
                    other.load_weights(bucket[0])

        found = {"count": self.gathered(str(self.worker.weight_buckets()))}
        found["left out"] = self.raised(lambda: send(1))
        other = roles.make_actor(self.config, "rollout", rank=self.rank, world=2)
        found["whole"] = self.raised(lambda: send(None))
        found["same"] = self.gathered(str(same(self.generate(other), self.generate())))
        return found


def same(first: Any, second: Any) -> bool:
    return bool(first.ragged("tokens").equal(second.ragged("tokens")))


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    config = roles.make_config(folder, "actor_rollout_ref.rollout.name=hf")
    actor_part.buckets = lambda sizes, limit: buckets(
        sizes, 8192
    )  # a limit in MiB would be larger than the model
    ranks = Ranks(config, int(os.environ["RANK"]))
    ranks.learn()
    shards, whole = ranks.worker.actor.digest(), digest(ranks.worker.actor.weights())
    record = {
        "digests": ranks.gathered(shards == whole),
        "half digests": ranks.gathered(
            ranks.worker.actor.digest(torch.bfloat16)
            == digest(ranks.worker.actor.weights(dtype=torch.bfloat16))
        ),
        "stale gather": ranks.stale_gather(),
        "shared": ranks.raised(ranks.generate),
        "streamed": ranks.streamed(),
        "apart": ranks.apart(),
    }
    if ranks.rank == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
