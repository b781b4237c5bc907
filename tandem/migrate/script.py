"""Run a user's shell script with bash to record its calls of a trainer.

Only programs that print are run; all other programs are recorded instead. Bash runs in a sandbox, so that it
cannot change files or use the network.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tandem.errors import ConfigError, TandemError
from tandem.lifetime import scratch_folder
from tandem.sandbox.dry import run_dry

REPLACED = (
    *("python", "python3", *(f"python3.{minor}" for minor in range(8, 16)), "uv", "torchrun", "accelerate"),
    *("deepspeed", "srun", "mpirun", "ray"),
)
"""Programs with which scripts start verl. A call of such a program is recorded, not run."""

HARMLESS = (
    *("awk", "basename", "bash", "cat", "cut", "date", "dirname", "env", "expr", "getconf", "grep", "head"),
    *("hostname", "id", "ls", "nohup", "nproc", "numactl", "nvidia-smi", "paste", "readlink", "realpath"),
    *("rev", "sed", "seq", "setsid", "sort", "stdbuf", "tac", "tail", "timeout", "tr", "uname", "uniq"),
    *("wc", "which", "whoami"),
)
"""Programs that run, because they only print or start another program."""

LIMIT_S = 60.0
_OWN = frozenset({"BASH_ENV", "OLDPWD", "PATH", "PWD", "SHLVL", "_"})


@dataclass(frozen=True)
class Call:
    """A call of verl's trainer that a script made.

    Attributes:
        number: the number of the call in the script, from 1.
        words: the program and its arguments, as the program would have received them.
        folder: the working folder of the call.
        variables: the environment variables of the call that differ from this process's environment.
    """

    number: int
    words: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Script:
    """A user's shell script that was run to its end.

    Attributes:
        path: the script.
        status: the exit status of the script.
        calls: the calls of a trainer, in order.
        others: the other commands that were not run, in order.
    """

    path: str
    status: int
    calls: list[Call]
    others: list[str]

    @classmethod
    def read(cls, path: str, arguments: Sequence[str] = (), *, limit_s: float | None = None) -> Script:
        """Run a script with bash and record its calls of a trainer.

        Programs that do not print are recorded and not run. The output of the programs that run goes to
        standard error after the script has ended.

        Args:
            path: the script.
            arguments: the arguments of the script, `"$@"`.
            limit_s: seconds that the script may take; None: `LIMIT_S`.

        Raises:
            ConfigError: the script or bash does not exist, or this system cannot confine the script.
            TandemError: the script takes longer than the limit.
        """
        limit_s = LIMIT_S if limit_s is None else limit_s
        if not Path(path).is_file():
            raise ConfigError("this script does not exist", field="--from-verl", got=path)
        bash, shell = shutil.which("bash"), shutil.which("sh")
        if bash is None or shell is None:
            raise ConfigError(
                "bash is not installed, but it is needed to read the script", field="--from-verl"
            )
        with scratch_folder("script") as temporary:
            root = temporary.resolve()
            variables = _lay_out(root, bash)
            printed = root / "printed"
            redirected = [shell, "-c", 'exec "$@" >"$0" 2>&1', str(printed), bash, path, *arguments]
            status = run_dry(redirected, variables, root, limit_s)
            if printed.exists():
                sys.stderr.write(printed.read_text(encoding="utf-8", errors="replace"))
            if status is None:
                raise TandemError(
                    f"the script did not end within {limit_s:g} s",
                    field=path,
                    remedy="look for a loop that waits for a program which is not run here, such as "
                    "`ray status`; or pass the arguments after `-m verl.trainer.main_ppo` to tandem yourself",
                )
            numbers = sorted(int(file.stem) for file in (root / "calls").glob("*.whole"))
            calls = [_read(root / "calls" / str(number), number) for number in numbers]
            kept = sorted((root / "others").iterdir(), key=lambda file: int(file.name))
            return cls(path, status, calls, [file.read_text(errors="replace").strip() for file in kept])

    def call(self, number: int = 1, trainer: str = "verl.trainer.main_ppo") -> Call:
        """Return one of the recorded calls.

        Args:
            number: the number of the call, from 1.
            trainer: the module of the trainer, for the error message.

        Raises:
            ConfigError: the script ended without this call.
        """
        if len(self.calls) >= number:
            return self.calls[number - 1]
        if self.calls:
            raise ConfigError(
                "the script calls verl fewer times",
                field="--call",
                got=number,
                expected=f"1 to {len(self.calls)}",
            )
        raise ConfigError(
            f"the script ended without a call of {trainer.split('.')[0]}'s trainer",
            field=self.path,
            got=f"exit status {self.status}",
            expected=f"a command with `-m {trainer}` that bash reaches",
            remedy="give the arguments that the script needs after `--`; a call from inside another program, "
            "a container or another machine is not detected",
        )


def _lay_out(root: Path, bash: str) -> dict[str, str]:
    """Create the folder of replacement programs, and return the variables that make bash use it."""
    for name in ("calls", "others", "shims"):
        (root / name).mkdir()
    here = files("tandem.migrate")
    shims = root / "shims"
    shim = shims / ".other"
    shim.write_text(f"#!{bash} -p\n{here.joinpath('shim.sh').read_text(encoding='utf-8')}")
    shim.chmod(0o700)
    for name in (*REPLACED, "sh", "sleep", "tee"):
        (shims / name).symlink_to(".other")
    for name in HARMLESS:
        if program := shutil.which(name):
            (shims / name).symlink_to(program)
    before = root / "before.sh"
    before.write_text(f"tandem_root='{root}'\n" + here.joinpath("before.sh").read_text(encoding="utf-8"))
    return {"PATH": str(shims), "BASH_ENV": str(before)}


def _read(path: Path, number: int) -> Call:
    parts = os.fsdecode(path.read_bytes()).split("\0")[:-1]
    end = 2 + int(parts[1])
    variables = dict(part.split("=", 1) for part in parts[end:])
    changed = {
        name: value for name, value in variables.items() if name not in _OWN and os.environ.get(name) != value
    }
    return Call(number, tuple(parts[2:end]), parts[0], changed)
