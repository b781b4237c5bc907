"""Run a user's program in a sandbox in which it cannot change files or use the network (a dry run).

The program can read all files that the user can read. It cannot reach the network, or processes that it did
not start. Under sandlock (Landlock and seccomp), the program writes to copies of files, which are deleted
afterwards. Under bubblewrap (namespaces), all files are read-only.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from glob import glob
from importlib import import_module
from pathlib import Path

from tandem.errors import ConfigError
from tandem.lifetime import scratch_folder
from tandem.sandbox.protections import Bubblewrap, Protection, Sandlock

Runner = Callable[[Sequence[str], Mapping[str, str], Path, float], int | None]
_TRIAL_S = 30.0


def run_dry(command: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float) -> int | None:
    """Run a program with the current folder and the environment of this process.

    Args:
        command: path of the program, and its arguments.
        variables: environment variables to set, in addition to the environment of this process.
        folder: a folder in which written files are kept; all other written files are lost.
        limit_s: maximum running time, in seconds.

    Returns:
        the exit status; None if the program exceeded `limit_s` and was killed.

    Raises:
        ConfigError: this machine has no sandbox that works.
    """
    return _working_runner()(command, variables, folder, limit_s)


def _under_sandlock(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float
) -> int | None:
    library = import_module("sandlock")
    with scratch_folder("copies") as copies:
        box = library.Sandbox(
            fs_readable=["/"],
            fs_writable=["/dev/null", *_gpus()],
            workdir="/",  # files below it are copied before they are changed
            fs_storage=str(copies),
            on_exit=library.BranchAction.DEFER,
            on_error=library.BranchAction.DEFER,
            cwd=os.getcwd(),
            clean_env=True,  # otherwise it adds variables that libraries set after this process started
            env={**os.environ, **variables},
        )
        try:
            with box:
                ended = box.popen(command, stdin=library.StdioMode.NULL).wait(limit_s)
                if not box.pending:
                    return None
                written = Path(box.upper_dir, folder.relative_to("/"))
                if written.exists():
                    shutil.copytree(written, folder, symlinks=True, dirs_exist_ok=True)
                box.abort()
        except library.SandlockError as error:
            raise RuntimeError(str(error)) from error
    return int(ended.exit_code)


def _under_bubblewrap(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float
) -> int | None:
    options = ["--die-with-parent", "--new-session", "--unshare-all", "--cap-drop", "ALL"]
    options += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    options += ["--ro-bind", "/proc/sys", "/proc/sys"]  # root can write there even without capabilities
    options += ["--tmpfs", "/run"]  # hide the sockets of services that could write files for the program
    for path in _gpus():
        options += ["--dev-bind", path, path]
    options += ["--bind", str(folder), str(folder)]
    try:
        return subprocess.run(
            [Bubblewrap.version() or "bwrap", *options, "--", *command],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
            timeout=limit_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _gpus() -> list[str]:
    """Return the device files that `nvidia-smi` needs."""
    return glob("/dev/nvidia*")


@functools.cache
def _working_runner() -> Runner:
    problems = []
    runners: dict[type[Protection], Runner] = {Sandlock: _under_sandlock, Bubblewrap: _under_bubblewrap}
    for kind, runner in runners.items():
        name, true = kind.__name__.lower(), shutil.which("true") or "true"
        if not kind.version():
            problems.append(f"{name} is not installed")
            continue
        with scratch_folder("trial") as folder:
            try:
                status = runner([true], {}, folder, _TRIAL_S)
            except (ImportError, OSError, RuntimeError) as error:
                problems.append(f"{name} does not work here: {type(error).__name__}: {error}")
                continue
        if status == 0:
            return runner
        problems.append(f"{name} does not work here: exit status {status}")
    raise ConfigError(
        "this machine has no sandbox that keeps a script from writing files and using the network",
        field="dry run of a script",
        got="; ".join(problems),
        expected="sandlock on Linux 6.12 or newer, or bubblewrap with user namespaces allowed",
        remedy="pip install 'tandem[sandbox]', or install bubblewrap, or pass the arguments that follow "
        "`-m verl.trainer.main_ppo` in the script to tandem directly",
    )
