"""Shell scripts that call verl, run by the real bash: the words of their calls are compared one by one."""

import os
import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import ConfigError, TandemError
from tandem.migrate.script import Call, Script
from tandem.migrate.verl_call import understood
from tandem.sandbox import dry
from tandem.sandbox.protections import Bubblewrap, Sandlock

Write = Callable[[str], str]
MAIN = "python3 -m verl.trainer.main_ppo"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a script and returns its path."""

    def run(text: str) -> str:
        path = tmp_path / "run.sh"
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        return str(path)

    return run


def called(path: str, *arguments: str, call: int = 1) -> Call:
    return Script.read(path, arguments, limit_s=30).call(call)


def command(draw: random.Random) -> list[str]:
    """Return the words of a call, with characters that are difficult for shells."""
    hard = "aZ9'\"\\$`*?[]{},:=#!&|;<>()~%@ü中\t\n ////"
    texts = ["".join(draw.choices(hard, k=draw.randrange(12))) for _ in range(draw.randrange(1, 60))]
    return [f"{draw.choice(('', '+', '++'))}data.key_{place}={text}" for place, text in enumerate(texts)]


STYLES = ("continued", "array", "variables", "arguments", "function", "appended", "heredoc")


def script_of(words: list[str], style: str) -> tuple[str, list[str]]:
    """Return a script that calls verl with these words, and the script's own arguments."""
    quoted = [shlex.quote(word) for word in words]
    if style == "continued":
        return f"set -xeuo pipefail\n{MAIN} \\\n    " + " \\\n    ".join(quoted) + ' "$@"', []
    if style == "array":
        return "ARGS=(\n" + "\n".join(
            f"  {word}  # why" for word in quoted
        ) + f'\n)\n{MAIN} "${{ARGS[@]}}"', []
    if style == "variables":
        lines = [f"v{place}={word}" for place, word in enumerate(quoted)]
        return "\n".join(lines) + f"\nset -u\n{MAIN} " + " ".join(f'"$v{i}"' for i in range(len(words))), []
    if style == "arguments":
        return f'half={quoted[0]}\n{MAIN} "$half" "$@"', words[1:]
    if style == "function":
        return f'go() {{\n  local -a all=("$@")\n  {MAIN} "${{all[@]}}" | tee log.txt\n}}\ngo ' + " ".join(
            quoted
        ), []
    if style == "appended":
        return "A=()\n" + "\n".join(f"A+=({word})" for word in quoted) + f'\nexec {MAIN} "${{A[@]}}"', []
    return f"bash -s -- {' '.join(quoted)} <<'END'\n{MAIN} \"$@\"\nEND", []


@pytest.mark.parametrize("style", STYLES)
def test_every_word_of_a_call_is_taken(write, style, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    draw = random.Random()
    for _ in range(3):
        words = command(draw)
        text, arguments = script_of(words, style)
        call = called(write(text), *arguments)
        assert call.words == ("python3", "-m", "verl.trainer.main_ppo", *words)
        assert understood(call).arguments == tuple(words)
    assert os.listdir(tmp_path) == ["run.sh"]


WAYS = r"""
python3 -u RUN
python3.11 -X faulthandler -mverl.trainer.main_ppo a=b
PYTHON RUN
X=1 PYTHON -u RUN > /dev/null
P=$(which python3); $P RUN
P=$(command -v python); "$P" RUN
PATH=/usr/bin:/bin; python3 RUN
python verl/trainer/main_ppo.py a=b
uv -v run --extra vllm python RUN
uv run RUN
nohup env X=1 python3 RUN 2>&1 | tee log & wait
CMD='python3 RUN'; $CMD
CMD='python3 RUN'; eval "$CMD"
bash -c 'python3 RUN'
ray job submit --no-wait -- python3 RUN
ray job submit --address http://x:1 --runtime-env-json '{"pip": ["x"]}' -- python3 RUN
torchrun --nproc 1 RUN
python3 -um verl.trainer.main_ppo a=b
python3 -m recipe.dapo.main_dapo a=b
srun --nodes=1 python3 RUN
A=(a=b '$HOME/c' "/d/e"); python3 -m verl.trainer.main_ppo "${A[0]}"
A=() B=/usr/bin; A+=(x '/y z'); A[0]=/a B=/b; [ -n "$B" ] && python3 RUN
if true; then for i in 1; do (cd /; python3 RUN); done; fi
"""


@pytest.mark.parametrize("line", WAYS.strip().splitlines())
def test_ways_to_start_verl(write, line):
    line = line.replace("PYTHON", sys.executable).replace("RUN", "-m verl.trainer.main_ppo a=b")
    assert understood(called(write(line.replace("; ", "\n")))).arguments == ("a=b",)


def test_the_folder_and_the_environment_are_those_of_the_call(write, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_KEPT", "as before")
    (tmp_path / "below").mkdir()
    path = write(
        f"export NCCL_DEBUG=INFO MULTI=$'a\\nb=c'\nlocal_only=1\ncd {tmp_path}/below\nexport -n HOME\n"
        f"WANDB_MODE=offline {MAIN} a=b"
    )
    call = called(path)
    assert call.folder == str(tmp_path / "below")
    assert call.variables == {"NCCL_DEBUG": "INFO", "MULTI": "a\nb=c", "WANDB_MODE": "offline"}


def test_what_ray_was_given_counts(write, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "env.yaml").write_text("working_dir: ./\nenv_vars: {NCCL_DEBUG: WARN, N: 3}\npip: [x]\n")
    submitted = "--runtime-env=env.yaml --working-dir work --submission-id x --no-wait"
    text = f"cd {tmp_path}\nray start --head\nray job submit {submitted} -- {MAIN} a=b"
    asked = understood(called(write(text)))
    assert (asked.arguments, asked.folder) == (("a=b",), str(tmp_path / "work"))
    assert asked.variables == {"NCCL_DEBUG": "WARN", "N": "3"}
    assert [sentence.split(":")[0] for sentence in asked.around] == [
        "ray job submit --working-dir",
        "ray job submit --submission-id",
        "ray job submit --no-wait",
        "ray job submit, pip of the runtime environment",
    ]


def test_reading_a_script_runs_nothing_of_it(write, tmp_path):
    mark = tmp_path / "mark"
    path = write(
        f'set -e\ncd {tmp_path}\nmkdir {mark}\n/bin/mkdir {mark}\n{sys.executable} -c \'open("mark", "w")\'\n'
        f'python3 -c \'open("mark", "w")\'\nPATH=/bin:/usr/bin\ntouch {mark}\nsudo rm -rf {mark}\nray stop\n'
        f"sleep 100\npip install x\n[ $(nproc) -gt 0 ]\necho words | sort | tee {mark}\n"
        f"{MAIN} n=$(seq 3 | tail -1)\ncp a b"
    )
    script = Script.read(path, limit_s=30)
    assert script.call().words[-1] == "n=3"
    listed = [command.split()[0] for command in script.others]
    assert not mark.exists()
    kept = ["mkdir", "/bin/mkdir", sys.executable, "python3", "touch", "sudo", "ray", "sleep", "pip", "cp"]
    assert listed == kept


def test_a_script_is_read_to_its_end(write, tmp_path):
    path = write(
        f'cd {tmp_path}\npython3 -c \'open("before", "w")\'\n{MAIN} a=b\n{MAIN} status=$?\ntouch after'
    )
    script = Script.read(path, limit_s=60)
    assert script.call().words[-1] == "a=b"
    assert [other.words[-1] for other in script.calls] == ["a=b", "status=0"]
    assert [command.split()[0] for command in script.others] == ["python3", "touch"]
    assert not (tmp_path / "before").exists() and not (tmp_path / "after").exists()


@pytest.fixture(params=[Sandlock, Bubblewrap])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Make only one kind of sandbox available."""
    other = Bubblewrap if request.param is Sandlock else Sandlock
    if not request.param.version():
        pytest.skip(f"{request.param.__name__} is not installed")
    monkeypatch.setattr(other, "version", lambda: None)
    dry._working_runner.cache_clear()
    yield request.param
    dry._working_runner.cache_clear()


def test_a_script_writes_nothing_and_reaches_nobody(kind, write, tmp_path):
    (tmp_path / "kept").write_text("kept")
    python = f"env {sys.executable} -I -S -c"
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            path = write(
                f"cd {tmp_path}\necho x > redirected\n: >> appended\necho x > kept\n(exec 5>opened)\n"
                'env /usr/bin/touch touched\n"$(echo /usr/bin/touch)" touched\nenv rm -f kept\n'
                f"echo x > /dev/tcp/127.0.0.1/{port}\nenv curl -s -m 2 http://127.0.0.1:{port}\n"
                f"{python} 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 2)' "
                "&& REACHED=1\n"
                f'{python} \'open("by_python", "w")\'\nkill -9 {sleeper.pid}\n'
                f": > /proc/sys/vm/stat_interval && COPIED=1\n{MAIN} reached=$REACHED copied=$COPIED\n"
            )
            words = Script.read(path, limit_s=240).call().words
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert words[-2:] == ("reached=", "copied=1" if kind is Sandlock else "copied=")
    assert sorted(os.listdir(tmp_path)) == ["kept", "run.sh"]
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.skipif(not Sandlock.version(), reason="sandlock is not installed")
def test_a_script_reads_what_it_wrote(write, tmp_path):
    path = write(f"set -e\ncd {tmp_path}\necho a=b > words\n{MAIN} $(cat words) > log 2>&1")
    assert called(path).words[-1] == "a=b"
    assert os.listdir(tmp_path) == ["run.sh"]


def test_what_the_users_own_shells_read_first_does_not_count(kind, write, tmp_path, monkeypatch):
    (tmp_path / "own.sh").write_text("OWN=1\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "own.sh"))
    assert called(write(f"{MAIN} a=1 own=$OWN")).words[-2:] == ("a=1", "own=")


def test_without_protection_no_script_is_read(write, tmp_path, monkeypatch):
    for each in (Sandlock, Bubblewrap):
        monkeypatch.setattr(each, "version", lambda: None)
    dry._working_runner.cache_clear()
    with pytest.raises(ConfigError, match="no sandbox") as caught:
        called(write(f"touch {tmp_path}/mark\n{MAIN}"))
    assert "bubblewrap is not installed" in str(caught.value.got)
    assert "install bubblewrap" in str(caught.value.remedy)
    assert os.listdir(tmp_path) == ["run.sh"]


def test_a_later_call_is_taken(write, tmp_path):
    path = write(f"{MAIN} first=1\n{MAIN} second=2")
    assert called(path, call=2).words[-1] == "second=2"
    with pytest.raises(ConfigError, match="fewer times") as caught:
        called(path, call=3)
    assert caught.value.expected == "1 to 2"


def test_a_script_without_a_call(write):
    with pytest.raises(ConfigError, match="without a call of verl") as caught:
        called(write('[ -n "$1" ] || exit 7\n' + MAIN))
    assert caught.value.got == "exit status 7"
    with pytest.raises(ConfigError, match="script does not exist"):
        called("nowhere.sh")


@pytest.mark.parametrize(
    ("line", "name", "remedy"),
    [
        ("python3 -m recipe.spin.main_spin a=b", "recipe.spin.main_spin", "pass its overrides"),
        ("python3 recipe/prime/main_prime.py a=b", "recipe.prime.main_prime", "pass its overrides"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer a=b", "verl.trainer.fsdp_sft_trainer", "`tandem sft`"),
        ("python3 -m verl.trainer.main_eval a=b", "verl.trainer.main_eval", "`tandem eval`"),
    ],
)
def test_other_programs_of_verl_are_refused_by_name(write, line, name, remedy):
    with pytest.raises(ConfigError) as caught:
        understood(called(write(line)))
    assert caught.value.got == name
    assert remedy in str(caught.value.remedy)


def test_a_script_that_waits_for_ever_is_ended(write, tmp_path):
    path = write(f"while ! ray status | grep -q ready; do :; done\n{MAIN}")
    with pytest.raises(TandemError, match="did not end within 1 s"):
        Script.read(path, limit_s=1.0)
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not [command for command in commands if path.encode() in command]
