"""A user's own program that changes nothing. It reads what the user can read. It reaches no network, and no
process that it did not start. Under sandlock (Landlock and seccomp) it writes to copies, which are thrown
away; under bubblewrap (namespaces) all files are read-only."""

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

Way = Callable[[Sequence[str], Mapping[str, str], Path, float], int | None]
_TRIAL_S = 30.0


def run_dry(command: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float) -> int | None:
    """Run a program in the folder and the environment of this process.

    Args:
        command: the program, by its path, and its arguments.
        variables: of the environment, beside those of this process.
        folder: keeps what the program writes there; all else that it writes is lost.
        limit_s: seconds after which it is ended.

    Returns:
        the exit status; None where it was ended.

    Raises:
        ConfigError: nothing on this machine can hold it.
    """
    return _way()(command, variables, folder, limit_s)


def _under_sandlock(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float
) -> int | None:
    library = import_module("sandlock")
    with scratch_folder("copies") as copies:
        box = library.Sandbox(
            fs_readable=["/"],
            fs_writable=["/dev/null", *_gpus()],
            workdir="/",  # whose files are copied before they are changed
            fs_storage=str(copies),
            on_exit=library.BranchAction.DEFER,
            on_error=library.BranchAction.DEFER,
            cwd=os.getcwd(),
            clean_env=True,  # else also what libraries have set since this process began
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
    options += ["--ro-bind", "/proc/sys", "/proc/sys"]  # which root may write to without any capability
    options += ["--tmpfs", "/run"]  # where services listen that would write for a program
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
    """The devices that `nvidia-smi` asks."""
    return glob("/dev/nvidia*")


@functools.cache
def _way() -> Way:
    problems = []
    ways: dict[type[Protection], Way] = {Sandlock: _under_sandlock, Bubblewrap: _under_bubblewrap}
    for kind, way in ways.items():
        name, true = kind.__name__.lower(), shutil.which("true") or "true"
        if not kind.version():
            problems.append(f"{name} is not installed")
            continue
        with scratch_folder("trial") as folder:
            try:
                status = way([true], {}, folder, _TRIAL_S)
            except (ImportError, OSError, RuntimeError) as error:
                problems.append(f"{name} does not work here: {type(error).__name__}: {error}")
                continue
        if status == 0:
            return way
        problems.append(f"{name} does not work here: exit status {status}")
    raise ConfigError(
        "nothing on this machine keeps a script from writing files and reaching the network",
        field="a script that is read",
        got="; ".join(problems),
        expected="sandlock, on Linux 6.12 or newer, or bubblewrap, where user namespaces are allowed",
        remedy="pip install 'tandem[sandbox]', or install bubblewrap; or give what follows "
        "`-m verl.trainer.main_ppo` in the script to tandem itself",
    )
