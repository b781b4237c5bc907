"""A job for two ranks. Arguments: FOLDER of models, RESULTS to write.

An actor trains adapters, with its reference and its native rollout. The rollout uses sharded weights or
layers that are split over the ranks.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.models.parallel import leave_distributed
from tests.workers import roles

LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.name=native")
DIVIDED = {
    "sharded": (),
    "tensor": ("actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"),
}


def run(folder: Path, rank: int, words: tuple[str, ...]) -> dict[str, Any]:
    """Take two updates; return how far rollouts are from the actor, and the generated tokens."""
    config = roles.make_config(folder, *LORA, *words)
    worker = roles.make_actor(config, *roles.ALL, rank=rank, world=2)
    prompts = roles.make_prompts(4).chunk(2)[rank]
    found: dict[str, Any] = {"engines": sorted(worker.engines), "gaps": [], "tokens": []}
    for _ in range(3):
        batch = worker.generate_sequences(prompts, 2, roles.PARAMS)
        whole: list[Any] = [None, None]
        dist.all_gather_object(whole, batch)
        found["tokens"].append([part.ragged("tokens").values.tolist() for part in whole])
        mine = batch if worker.actor.share.size == 2 else type(batch).concat(whole)
        mine = roles.with_targets(mine)
        mine = mine.union(worker.compute_log_prob(mine)).union(worker.compute_ref_log_prob(mine))
        mask = mine.ragged("response_mask").values
        gap = (mine.ragged("old_log_probs").values - mine.ragged("rollout_log_probs").values)[mask]
        found["gaps"].append(float(gap.abs().max()))
        worker.update_actor(mine)
    return found


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    record = {name: run(folder, rank, words) for name, words in DIVIDED.items()}
    if rank == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
