"""A job for several ranks. Arguments: FOLDER of models, RESULTS to write."""

import os
import sys
from pathlib import Path

import torch

from tandem.models.parallel import leave_distributed
from tests.workers import roles


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    config = roles.make_config(folder)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    record = roles.program(roles.Team(config, rank, world))
    if rank == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
