"""A job for two ranks, which share the policy by FSDP, and one vLLM engine. Arguments: FOLDER, RESULTS."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.engines.rollout.vllm import engine as vllm_engine
from tandem.engines.weight_sync import WeightSyncError
from tandem.models.parallel import leave_distributed
from tests.workers import roles
from tests.workers.streamed import FAULTS


class Ranks:
    """The worker of this rank. Both ranks sample the whole batch together, and each trains on half of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        words = "rollout.name=vllm rollout.tensor_model_parallel_size=2 rollout.max_num_seqs=4"
        words += " actor.fsdp_config.model_dtype=fp32 ref.fsdp_config.model_dtype=fp32"
        keys = [f"actor_rollout_ref.{word}" for word in words.split()]
        self.config, self.rank = roles.make_config(folder, *keys, "trainer.n_gpus_per_node=2"), rank
        self.worker = roles.make_actor(self.config, "actor", "rollout", rank=rank, world=2)

    def generate(self, worker: Any = None) -> Any:
        return (worker or self.worker).generate_sequences(roles.make_prompts(5), 2, roles.PARAMS)

    def step(self) -> dict[str, Any]:
        batch = self.generate()
        share = roles.learn(self.worker, batch.chunk(2)[self.rank])
        names = {"tokens": "tokens", "log probs": "rollout_log_probs"}
        found = {name: batch.ragged(column).values.tolist() for name, column in names.items()}
        return found | {"versions": roles.versions(batch), "gap": roles.gap(share)}

    def streamed(self) -> bool:
        prompts, whole = roles.make_prompts(5), self.generate()
        left = self.worker.stream_sequences(prompts, 2, roles.PARAMS)
        next(left)
        left.close()
        parts = list(self.worker.stream_sequences(prompts, 2, roles.PARAMS))
        order = np.argsort([row for part in parts for row in part.rows]).tolist()
        found = type(whole).concat([part.batch for part in parts])[order]
        return len(parts) > 1 and found.ragged("tokens").equal(whole.ragged("tokens"))

    def fault(self, name: str) -> str:
        """Return the error if weights are damaged only on their way to the second rank."""
        load, (spoil, _) = vllm_engine.load_weights, FAULTS[name]
        if self.rank == 1:
            vllm_engine.load_weights = lambda model, stream: load(model, spoil(iter(stream)))
        try:
            self.generate()
        except WeightSyncError as error:
            return str(error.got)
        finally:
            vllm_engine.load_weights = load
        return "nothing"

    def apart(self) -> bool:
        """Return whether a rollout with weights from buckets generates the same as the actor's own."""
        other = roles.make_actor(self.config, "rollout", rank=self.rank, world=2)
        roles.broadcast(self.worker, other)
        return bool(self.generate(other).ragged("tokens").equal(self.generate().ragged("tokens")))


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    ranks = Ranks(folder, int(os.environ["RANK"]))
    place = ranks.worker.meshes()["rollout"]
    record = {"place": (place.dp_rank, place.dp_size, place.collects)}
    record |= {"steps": [ranks.step(), ranks.step()]}
    record |= {"faults": {name: ranks.fault(name) for name in ("damaged", "swapped")}}
    record |= {"after": ranks.step(), "streamed": ranks.streamed(), "apart": ranks.apart()}
    record["counted"] = ranks.worker.take_observed().to_floats()
    torch.save(record, results / f"rank_{ranks.rank}.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
