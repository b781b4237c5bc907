"""`tandem`'s own commands in processes of their own, as a user types them."""

from __future__ import annotations

import sys
from unittest import mock

from benchmarks.device.processes import printed_by, run_command, run_forked
from benchmarks.device.report import Setting, free_memory
from tandem.cli.main import main
from tandem.demo import program

SMALL_DEMO = {"SFT_STEPS": 2, "SFT_BATCH": 16, "TRAIN_PROBLEMS": 64, "VALIDATION_PROBLEMS": 16}


def tandem(setting: Setting, *words: str, limit_s: float) -> str:
    """What `tandem` printed for these words; where all is tiny, by a fork that makes a small demo.

    Raises:
        RuntimeError: it failed, or took longer; its last words.
    """
    free_memory(setting.device)  # what this process keeps for itself the command cannot have
    limit_s = min(limit_s, max(setting.left_s - 5, 5))

    def small() -> None:
        with mock.patch.multiple(program, **SMALL_DEMO):
            sys.exit(main(list(words)))

    command = [sys.executable, "-m", "tandem", *words]
    return printed_by(
        lambda said: (
            run_forked(small, limit_s, stdout=said, stderr=said)
            if setting.forks
            else run_command(command, limit_s, stdout=said, stderr=said)
        ),
        f"tandem {words[0]}",
        limit_s,
    )
