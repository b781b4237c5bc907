"""The process that a test kills while it saves checkpoints."""

import os

import torch

from tandem.checkpoint.manager import CheckpointManager
from tandem.lifetime import threads

SIZES = (300_000, 100_000, 50_000)


def values(step, part):
    """Return content that shows whether a file is complete and belongs to this step."""
    return torch.full((SIZES[part],), float(step * 10 + part))


def save(manager, step):
    def write_model(folder):
        for part in (0, 1):
            torch.save(values(step, part), folder / f"shard_{part}.pt")

    def write_critic(folder):
        torch.save(values(step, 2), folder / "shard.pt")

    manager.save(step, {"actor": write_model, "critic": write_critic}, {"step": step, "lr": 0.1 * step})


def save_forever(root, started):
    assert threads(os.getppid()) == 1  # the parent is the server that forked this process
    manager = CheckpointManager(root, keep=2)
    found = manager.latest()
    step = 0 if found is None else found.step
    started.set()
    while True:
        step += 1
        save(manager, step)
        save(manager, step)  # save the step again, so that some kills interrupt a replacement
