"""Answers of verl 0.9.1, from a process in its own environment (`make peers`)."""

import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "verl" / "bin" / "python"


def answers(what, inputs, folder):
    """Return what `benchmarks/peers/verl_WHAT.py` writes for the inputs."""
    assert PYTHON.exists(), "make peers"
    torch.save(inputs, folder / "in.pt")
    script = ROOT / "benchmarks" / "peers" / f"verl_{what}.py"
    command = [PYTHON, script, folder / "in.pt", folder / "out.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt", weights_only=False)
