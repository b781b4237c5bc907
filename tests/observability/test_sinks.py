import builtins
import io
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.config import tables
from tandem.errors import ConfigError
from tandem.observability.sinks import SINKS, Generation, RunInfo, Sinks, absent_sinks
from tandem.observability.sinks.console import ConsoleSink, duration

HOSTILE = "\x1b[2Jgone [/bold] <b>"


@pytest.fixture
def info(tmp_path):
    return RunInfo("tandem", "test", tmp_path, total_steps=100, config={"trainer": {"seed": 0}})


def printed(info, clock, *steps):
    out, times = io.StringIO(), iter(clock)
    sink = ConsoleSink(info, Console(file=out, width=100), clock=lambda: next(times))
    for step, metrics in steps:
        sink.log(step, metrics)
    return [line.strip() for line in out.getvalue().splitlines()]


def test_the_console_prints_a_line_for_a_step_but_not_many_a_second(info):
    assert printed(
        replace(info, start_step=10),
        [100.0, 100.0, 102.0, 102.1, 106.0],
        (10, {"val/accuracy": 0.125}),
        (11, {"reward/mean": 0.5, "perf/step_tokens_per_s": 12345.6, "actor/loss": 1.0}),
        (12, {"reward/mean": 0.5}),
        (13, {"reward/mean": 0.75}),
    ) == [
        "step 10/100  accuracy 0.125",
        "step 11/100  reward 0.500  accuracy 0.125  12,346 tokens/s  2 min 58 s left",  # 89 steps at 2 s
        "step 13/100  reward 0.750  accuracy 0.125  2 min 54 s left",  # 87 steps at 2 s
    ]


def test_the_last_step_is_printed_and_the_accuracy_is_carried(info):
    last = {"actor/loss": 0.125, "actor/kl": 0.001, "reward/mean": 1.0}
    assert printed(info, [0.0, 1.0, 2.0], (1, {"val/accuracy": 0.5, "reward/mean": 1.0}), (100, last)) == [
        "step 1/100  reward 1.000  accuracy 0.500  1 min 39 s left",
        "step 100/100  reward 1.000  accuracy 0.500",
    ]


def test_the_console_shows_responses_escaped(info):
    sink = ConsoleSink(info, Console(file=(out := io.StringIO()), width=80))
    sink.log_generations(2, [Generation("user: hello", HOSTILE, 0.5)])
    title, *rows = out.getvalue().splitlines()
    assert "step 2" in title and "1 of 1" in title and "0.5" in title
    assert rows == ["  | user: hello", "  | \\x1b[2Jgone [/bold] <b>"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(6.6, "7 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_file_sink_keeps_the_lines_and_appends(info):
    for step in (1, 2):
        sinks = Sinks(["file"], info, pytest.fail)
        sinks.log(step, {"reward/mean": 0.5})
        sinks.close()
    lines = (info.folder / "log" / "progress.log").read_text().splitlines()
    assert [line[:24] for line in lines] == ["step 1/100  reward 0.500", "step 2/100  reward 0.500"]


def test_tensorboard_shows_a_resumed_run_without_its_lost_steps(info):
    for steps, value in ((range(5), 0.0), (range(3, 6), 1.0)):
        sinks = Sinks(["tensorboard"], info, pytest.fail)
        for step in steps:
            sinks.log(step, {"x": value})
        sinks.log_generations(2, [Generation("user: hello", HOSTILE, 0.5), Generation("", "x", 1.0)])
        sinks.close()
    events = EventAccumulator(str(info.folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [*enumerate([0, 0, 0, 1, 1, 1])]
    first = events.Tensors("val/generations/0/text_summary")[0]
    assert first.step == 2 and b"    user: hello" in first.tensor_proto.string_val[0]


def test_an_unknown_logger_is_an_error_that_lists_the_known_ones(info):
    assert sorted(tables.LOGGERS) == sorted(SINKS)
    with pytest.raises(ConfigError) as caught:
        Sinks(["console", "wandbb"], info, pytest.fail)
    assert (caught.value.got, caught.value.expected) == ("wandbb", ", ".join(SINKS))


@pytest.mark.parametrize("name", ["wandb", "vemlp_wandb", "mlflow", "swanlab", "clearml", "trackio"])
def test_a_missing_package_gives_its_install_command_and_stops_no_run(info, monkeypatch, name):
    module, package = SINKS[name][0].split(":")[0], SINKS[name][1]
    real_import, said = builtins.__import__, []

    def without_library(wanted, *args, **kwargs):
        if wanted.split(".")[0] == package.replace("-", "_"):
            raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)
        return real_import(wanted, *args, **kwargs)

    monkeypatch.delitem(sys.modules, f"tandem.observability.sinks.{module}", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_library)
    (error,) = absent_sinks(["console", name]).values()
    assert f"pip install {package}," in str(error.remedy)
    sinks = Sinks(["file", name], info, said.append)
    sinks.log(1, {"reward/mean": 0.5})
    sinks.close()
    assert len(said) == 1 and str(error.remedy) in said[0]
    assert "reward 0.500" in (info.folder / "log" / "progress.log").read_text()


@pytest.fixture
def sick(monkeypatch):
    """Return a function that makes a sink raise in one of its methods, or hang until it is released."""

    def made(where, error=None):
        released = threading.Event()

        def does(what):
            if what == where and error is not None:
                raise error
            assert what != where or released.wait(60)

        methods = {"__init__": lambda self, info: does("start"), "close": lambda self: does("end")}
        methods["log"] = lambda self, step, metrics: does(f"step {step}")
        Sick = type("Sick", (), methods)
        monkeypatch.setattr("tandem.observability.sinks.tensorboard.TensorBoardSink", Sick)
        return released

    return made


@pytest.mark.parametrize("where", ["start", "step 2", "end"])
@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(1), None])
def test_a_sink_that_fails_or_hangs_is_reported_once_and_the_others_go_on(info, sick, where, error):
    released, said = sick(where, error), []
    sinks = Sinks(["tensorboard", "file"], info, said.append, limit_s=0.3)
    for step in (1, 2, 3):
        sinks.log(step, {"reward/mean": 0.5})
    sinks.close()
    released.set()
    what = "did not answer" if error is None else "failed"
    (told,) = said
    assert told.startswith(f"logger tensorboard {what} at {'the ' if where != 'step 2' else ''}{where}")
    assert error is None or repr(error) in told
    assert len((info.folder / "log" / "progress.log").read_text().splitlines()) == 3


def test_a_sink_that_hangs_is_dropped_while_the_run_goes_on(info, sick):
    released, said, step = sick("step 1"), [], 0
    sinks = Sinks(["tensorboard"], info, said.append, limit_s=0.05)
    while not said and step < 1000:  # no step waits
        step += 1
        sinks.log(step, {})
        released.wait(0.01)
    released.set()
    assert said[0].startswith("logger tensorboard did not answer at step 1 within 0.05 s")
    sinks.close()
    assert len(said) == 1
