"""What `tandem generate` and `tandem eval` print before the slow imports."""

from pathlib import Path
from types import ModuleType

import pytest

from tandem.cli import eval as eval_command
from tandem.cli import generate as generate_command
from tandem.cli.main import main
from tests.support.tiny import make_model, problem, write_rows


@pytest.mark.parametrize(
    ("words", "module", "said"),
    [
        (
            ["generate", "model.path=model"],
            generate_command,
            "answering in.parquet with model; the responses go to out.jsonl\n",
        ),
        (
            ["eval", "model.path=model"],
            eval_command,
            "scoring the responses of model to in.parquet; the report goes to out.json\n",
        ),
        (["eval"], eval_command, "scoring in.parquet; the report goes to out.json\n"),
    ],
)
def test_the_first_line_comes_before_what_takes_long(words, module, said, monkeypatch, capsys, tmp_path):
    class Loaded(Exception):
        """A stand-in for a slow import."""

    def load(name: str) -> ModuleType:
        raise Loaded

    monkeypatch.chdir(tmp_path)
    make_model(Path("model"))
    write_rows(Path("in.parquet"), [problem(3, 7)])

    monkeypatch.setattr(module, "import_module", load)
    with pytest.raises(Loaded):
        main([*words, "data.path=in.parquet", f"data.output_path={said.split()[-1]}"])
    assert capsys.readouterr().err.endswith(said)


def test_what_is_left_to_write_is_said_before_the_model_is_loaded(tmp_path, capsys):
    make_model(tmp_path / "model")
    data = write_rows(tmp_path / "in.parquet", [problem(a, 7) for a in range(3, 6)])
    paths = (f"data.path={data}", f"model.path={tmp_path / 'model'}")
    lengths = ("data.max_response_length=4", "rollout.n=2")
    assert main(["generate", *paths, *lengths, f"data.output_path={tmp_path / 'out.jsonl'}"]) == 0
    said = capsys.readouterr().err
    assert "6 responses to generate; loading the model\n" in said
    assert said.index("loading the model") < said.index("generate: 6/6 samples in ")
