"""A shell script, read by bash: its calls of a trainer are kept, and no program runs but those that print."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import TracebackType

from tandem.errors import ConfigError, TandemError
from tandem.lifetime import make_scratch, remove_scratch

REPLACED = (
    *("python", "python3", *(f"python3.{minor}" for minor in range(8, 16)), "uv", "torchrun", "accelerate"),
    *("deepspeed", "srun", "mpirun", "ray"),
)
"""Programs through which scripts start verl."""

HARMLESS = (
    *("awk", "basename", "bash", "cat", "cut", "date", "dirname", "env", "expr", "getconf", "grep", "head"),
    *("hostname", "id", "ls", "nohup", "nproc", "numactl", "nvidia-smi", "paste", "readlink", "realpath"),
    *("rev", "sed", "seq", "setsid", "sort", "stdbuf", "tac", "tail", "timeout", "tr", "uname", "uniq"),
    *("wc", "which", "whoami"),
)
"""Programs that run: they print, or start another program."""

LIMIT_S = 60.0
_OWN = frozenset({"BASH_ENV", "OLDPWD", "PATH", "PWD", "SHLVL", "_"})


@dataclass(frozen=True)
class Call:
    """A call of verl's trainer that a script made.

    Attributes:
        number: its place among the script's calls, from 1.
        words: the program and its arguments, as the program would have got them.
        folder: where it was called.
        variables: the environment variables of the call that differ from this process's own.
    """

    number: int
    words: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]


class Script:
    """A user's shell script and its calls of verl's trainer. Programs that do not print are listed, not run.

    Args:
        path: the script.
        arguments: its own, `"$@"`.
        call: which of its calls is taken, from 1.
        limit_s: seconds that it may take.
        trainer: the module whose call is looked for.

    Used as a context; a script that still runs at its end is ended with all that it started.
    """

    def __init__(
        self,
        path: str,
        arguments: Sequence[str] = (),
        *,
        call: int = 1,
        limit_s: float | None = None,
        trainer: str = "verl.trainer.main_ppo",
    ) -> None:
        self.trainer = trainer
        self.path, self.arguments, self.chosen = path, tuple(arguments), call
        self.limit_s = LIMIT_S if limit_s is None else limit_s

    def __enter__(self) -> Script:
        if not Path(self.path).is_file():
            raise ConfigError("no such script", field="--from-verl", got=self.path)
        if (bash := shutil.which("bash")) is None:
            raise ConfigError("bash is not installed, which reads the script", field="--from-verl")
        self._temporary = make_scratch("script")
        self._root = self._temporary.resolve()
        environment = self._lay_out(bash)
        self._process = subprocess.Popen(
            [bash, self.path, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
            stderr=None if _has_descriptor() else subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:  # what it left behind on purpose, as by nohup, lives on
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        remove_scratch(self._temporary)

    def reach(self) -> Call:
        """Read the script to its end, and return the chosen call.

        Raises:
            ConfigError: the script ends without it.
            TandemError: it takes longer than the limit.
        """
        try:
            status = self._process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            raise TandemError(
                f"the script has not ended within {self.limit_s:g} s",
                field=self.path,
                remedy="look for a loop in it that waits for a program which is not run here, such as "
                "`ray status`; or give what follows `-m verl.trainer.main_ppo` to tandem itself",
            ) from None
        calls = self.calls
        if len(calls) >= self.chosen:
            return calls[self.chosen - 1]
        if calls:
            raise ConfigError(
                "the script has fewer calls of verl",
                field="--call",
                got=self.chosen,
                expected=f"1 to {len(calls)}",
            )
        raise ConfigError(
            f"the script ended without a call of {self.trainer.split('.')[0]}'s trainer",
            field=self.path,
            got=f"exit status {status}",
            expected=f"a command with `-m {self.trainer}` that bash comes to",
            remedy="give the arguments that the script asks for after `--`; a program that calls verl on its "
            "own, in a container or on another machine, is not seen",
        )

    @property
    def calls(self) -> list[Call]:
        """The calls so far, in order."""
        folder = self._root / "calls"
        numbers = sorted(int(path.stem) for path in folder.glob("*.whole"))
        return [_read(folder / str(number), number) for number in numbers]

    @property
    def others(self) -> list[str]:
        """The commands so far that were not run, in order."""
        folder = self._root / "others"
        numbers = sorted(int(path.name) for path in folder.iterdir())
        return [(folder / str(number)).read_text(errors="replace").strip() for number in numbers]

    def _lay_out(self, bash: str) -> dict[str, str]:
        """Make the folder of shims; return the script's environment."""
        for name in ("calls", "others", "shims"):
            (self._root / name).mkdir()
        here = files("tandem.migrate")
        shims = self._root / "shims"
        shim = shims / ".other"
        shim.write_text(f"#!{bash} -p\n{here.joinpath('shim.sh').read_text(encoding='utf-8')}")
        shim.chmod(0o700)
        for name in (*REPLACED, "sh", "sleep", "tee"):
            (shims / name).symlink_to(".other")
        for name in HARMLESS:
            if program := shutil.which(name):
                (shims / name).symlink_to(program)
        before = self._root / "before.sh"
        before.write_text(
            f"tandem_root='{self._root}'\n" + here.joinpath("before.sh").read_text(encoding="utf-8")
        )
        return {**os.environ, "PATH": str(shims), "BASH_ENV": str(before)}


def _read(path: Path, number: int) -> Call:
    parts = os.fsdecode(path.read_bytes()).split("\0")[:-1]
    end = 2 + int(parts[1])
    variables = dict(part.split("=", 1) for part in parts[end:])
    changed = {
        name: value for name, value in variables.items() if name not in _OWN and os.environ.get(name) != value
    }
    return Call(number, tuple(parts[2:end]), parts[0], changed)


def _has_descriptor() -> bool:
    """Whether standard error is a file of the system, as it is not under every notebook or test."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
