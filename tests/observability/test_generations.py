import io

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.observability.run import RunFolder
from tandem.observability.sinks import Generation, RunInfo, Sinks
from tandem.observability.sinks.console import ConsoleSink

HOSTILE = "\x1b[2Jgone [/bold] <b>"


def written(folder: RunFolder, step: int, texts: list[str], part: str) -> None:
    table = {
        "messages": [[{"role": "user", "content": f"say {text}"}] for text in texts],
        "response_text": texts,
        "scores": [float(place) for place in range(len(texts))],
        "uid": texts,
    }
    folder.write_samples(step, table, part=part)


def test_the_first_responses_of_a_validation(tmp_path):
    folder = RunFolder(tmp_path)
    written(folder, 3, ["a", "b"], "val")
    written(folder, 3, ["c", "d"], "val1")
    written(folder, 3, ["trained"], "")
    written(folder, 4, ["later"], "val")
    assert folder.generations(3, 3) == [
        Generation("user: say a", "a", 0.0),
        Generation("user: say b", "b", 1.0),
        Generation("user: say c", "c", 0.0),
    ]
    assert [each.response for each in folder.generations(3, 9)] == ["a", "b", "c", "d"]
    assert folder.generations(7, 1) == []


def test_the_console_shows_them_escaped(tmp_path):
    out = io.StringIO()
    sink = ConsoleSink(RunInfo("p", "e", tmp_path, total_steps=1), Console(file=out, width=80))
    sink.log_generations(2, [Generation("user: hello", HOSTILE, 0.5)])
    assert out.getvalue().splitlines() == [
        "validation after step 2, response 1 of 1, score 0.5",
        "  | user: hello",
        "  | \\x1b[2Jgone [/bold] <b>",
    ]


def test_tensorboard_has_them_as_text(tmp_path):
    sinks = Sinks(["tensorboard"], RunInfo("p", "e", tmp_path, total_steps=9), report=print)
    sinks.log_generations(2, [Generation("user: hello", HOSTILE, 0.5), Generation("", "x", 1.0)])
    sinks.log(2, {"val/accuracy": 0.5})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (first,) = events.Tensors("val/generations/0/text_summary")
    assert first.step == 2 and b"    user: hello" in first.tensor_proto.string_val[0]
    assert events.Scalars("val/accuracy")[0].value == 0.5
