"""Run `tandem` commands in separate processes, as a user does."""

from __future__ import annotations

import sys
from unittest import mock

from benchmarks.device.processes import printed_by, run_command, run_forked
from benchmarks.device.report import Setting, free_memory
from tandem.cli.main import main
from tandem.demo import program

SMALL_DEMO = {"SFT_STEPS": 2, "SFT_BATCH": 16, "TRAIN_PROBLEMS": 64, "VALIDATION_PROBLEMS": 16}


def tandem(setting: Setting, *words: str, limit_s: float) -> str:
    """Run a `tandem` command and return its output.

    With `--tiny` on a CPU this forks the current process and makes the demo small.

    Raises:
        RuntimeError: the command failed or took too long; the message has the end of the output.
    """
    free_memory(setting.device)  # the command cannot use memory that this process keeps cached
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
