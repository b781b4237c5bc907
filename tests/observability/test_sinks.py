import builtins
import io
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.config import tables
from tandem.errors import ConfigError
from tandem.observability.sinks import SINKS, RunInfo, Sinks, absent_sinks
from tandem.observability.sinks.console import ConsoleSink, duration
from tandem.observability.sinks.tensorboard import TensorBoardSink


@pytest.fixture
def info(tmp_path):
    return RunInfo("tandem", "test", tmp_path, total_steps=100, config={"trainer": {"seed": 0}})


def _unexpected(sentence: str) -> None:
    raise AssertionError(sentence)


def _console(info: RunInfo, clock: Sequence[float]) -> tuple[ConsoleSink, io.StringIO]:
    out = io.StringIO()
    times = iter(clock)
    return ConsoleSink(info, Console(file=out, width=100), clock=lambda: next(times)), out


def test_the_console_prints_a_line_for_a_step_but_not_many_a_second(info):
    sink, out = _console(replace(info, start_step=10), [100.0, 100.0, 102.0, 102.1, 106.0])
    sink.log(10, {"val/accuracy": 0.125})
    sink.log(11, {"reward/mean": 0.5, "perf/step_tokens_per_s": 12345.6, "actor/loss": 1.0})
    sink.log(12, {"reward/mean": 0.5})
    sink.log(13, {"reward/mean": 0.75})
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines == [
        "step 10/100  accuracy 0.125",
        "step 11/100  reward 0.500  accuracy 0.125  12,346 tokens/s  2 min 58 s left",  # 89 steps at 2 s
        "step 13/100  reward 0.750  accuracy 0.125  2 min 54 s left",  # 87 steps at 2 s
    ]


def test_the_last_step_is_printed_and_the_accuracy_is_carried(info):
    sink, out = _console(info, [0.0, 1.0, 2.0])
    sink.log(1, {"val/accuracy": 0.5, "reward/mean": 1.0})
    sink.log(100, {"actor/loss": 0.125, "actor/kl": 0.001, "reward/mean": 1.0})
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines == [
        "step 1/100 reward 1.000 accuracy 0.500 1 min 39 s left",
        "step 100/100 reward 1.000 accuracy 0.500",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(6.6, "7 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_file_sink_keeps_the_lines_and_appends(info):
    for step in (1, 2):
        sinks = Sinks(["file"], info, _unexpected)
        sinks.log(step, {"reward/mean": 0.5})
        sinks.close()
    lines = (info.folder / "log" / "progress.log").read_text().splitlines()
    assert [line[:24] for line in lines] == ["step 1/100  reward 0.500", "step 2/100  reward 0.500"]


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_files_hold_what_was_logged(info):
    sinks = Sinks(["tensorboard"], info, _unexpected)
    sinks.log(0, {"val/accuracy": 0.25})
    sinks.log(1, {"val/accuracy": 0.5, "actor/loss": -2.0})
    sinks.close()
    assert _scalars(info.folder / "tensorboard") == {
        "val/accuracy": [(0, 0.25), (1, 0.5)],
        "actor/loss": [(1, -2.0)],
    }


def test_tensorboard_shows_a_resumed_run_without_its_lost_steps(info):
    for steps, value in ((range(5), 0.0), (range(3, 6), 1.0)):
        sink = TensorBoardSink(info)
        for step in steps:
            sink.log(step, {"x": value})
        sink.close()
    expected = [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert _scalars(info.folder / "tensorboard") == {"x": expected}


def test_the_config_knows_the_same_loggers():
    assert sorted(tables.LOGGERS) == sorted(SINKS)


def test_an_unknown_logger_is_an_error_that_lists_the_known_ones(info):
    with pytest.raises(ConfigError) as caught:
        Sinks(["console", "wandbb"], info, _unexpected)
    assert caught.value.got == "wandbb"
    assert caught.value.expected == ", ".join(SINKS)


@pytest.mark.parametrize("name", ["wandb", "vemlp_wandb", "mlflow", "swanlab", "clearml", "trackio"])
def test_a_missing_package_gives_its_install_command_and_stops_no_run(info, monkeypatch, name):
    module, package = SINKS[name][0].split(":")[0], SINKS[name][1]
    library = package.replace("-", "_")
    real_import = builtins.__import__

    def without_library(wanted, *args, **kwargs):
        if wanted.split(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)
        return real_import(wanted, *args, **kwargs)

    monkeypatch.delitem(sys.modules, f"tandem.observability.sinks.{module}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_library)
    (error,) = absent_sinks(["console", name]).values()
    assert error.remedy is not None
    assert error.remedy.startswith(f"run pip install {package},")
    said: list[str] = []
    sinks = Sinks(["file", name], info, said.append)
    sinks.log(1, {"reward/mean": 0.5})
    sinks.close()
    assert len(said) == 1
    assert error.remedy in said[0]
    assert "reward 0.500" in (info.folder / "log" / "progress.log").read_text()


class Sick:
    """A sink that raises in one of its methods, or hangs until it is released."""

    where = ""
    error: BaseException | None = None
    released = threading.Event()

    def __init__(self, info: RunInfo) -> None:
        self._do("start")

    def _do(self, what: str) -> None:
        if what == self.where:
            if self.error is not None:
                raise self.error
            assert self.released.wait(60)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._do(f"step {step}")

    def close(self) -> None:
        self._do("end")


@pytest.mark.parametrize("where", ["start", "step 2", "end"])
@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(1), None])
def test_a_sink_that_fails_or_hangs_is_reported_once_and_the_others_go_on(info, monkeypatch, where, error):
    sick = type("Sick", (Sick,), {"where": where, "error": error, "released": threading.Event()})
    monkeypatch.setattr("tandem.observability.sinks.tensorboard.TensorBoardSink", sick)
    said: list[str] = []
    sinks = Sinks(["tensorboard", "file"], info, said.append, limit_s=0.3)
    for step in (1, 2, 3):
        sinks.log(step, {"reward/mean": 0.5})
    sinks.close()
    sick.released.set()
    what = "did not answer" if error is None else "failed"
    assert len(said) == 1
    assert said[0].startswith(f"logger tensorboard {what} at {'the ' if where != 'step 2' else ''}{where}")
    assert error is None or repr(error) in said[0]
    assert len((info.folder / "log" / "progress.log").read_text().splitlines()) == 3


def test_a_sink_that_hangs_is_dropped_while_the_run_goes_on(info, monkeypatch):
    sick = type("Sick", (Sick,), {"where": "step 1", "released": threading.Event()})
    monkeypatch.setattr("tandem.observability.sinks.tensorboard.TensorBoardSink", sick)
    said: list[str] = []
    sinks = Sinks(["tensorboard"], info, said.append, limit_s=0.05)
    step = 0
    while not said and step < 1000:  # no step waits
        step += 1
        sinks.log(step, {})
        sick.released.wait(0.01)
    sick.released.set()
    assert len(said) == 1 and said[0].startswith("logger tensorboard did not answer at step 1 within 0.05 s")
    sinks.close()
    assert len(said) == 1
