"""`tandem generate`: its output, its refusals, and the continuation of a killed run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tandem.cli.main import main
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.models.loading import load_policy, load_tokenizer
from tandem.observability.journal import Journal
from tandem.protocol import Request, SamplingParams
from tests.support.killing import kill_half_way
from tests.support.tiny import make_model, problem, write_rows

ROWS, N, LENGTH = 12, 3, 60


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and a file of prompts."""
    folder = tmp_path_factory.mktemp("generate")
    make_model(folder / "model")
    write_rows(folder / "in.parquet", [problem(a, 7) for a in range(3, 3 + ROWS)])
    return folder


def words(shop: Path, out: Path, *more: str, data: str = "in.parquet") -> list[str]:
    paths = [f"data.path={shop / data}", f"model.path={shop / 'model'}", f"data.output_path={out}"]
    sizes = [f"data.max_response_length={LENGTH}", f"rollout.n={N}", "trainer.device=cpu"]
    exact = "rollout.dtype=float64"  # so that rounding does not depend on the other requests
    return ["generate", *paths, *sizes, exact, *more]


def run(shop: Path, out: Path, *more: str, data: str = "in.parquet") -> list[dict[str, Any]]:
    assert main(words(shop, out, *more, data=data)) == 0
    if out.suffix == ".jsonl":
        return [json.loads(line) for line in out.read_text().splitlines()]
    return pq.read_table(out).to_pylist()


def test_the_columns_of_the_input_and_the_responses(shop, tmp_path):
    rows = run(shop, tmp_path / "out.parquet", "trainer.seed=5", "rollout.top_p=0.9", "rollout.stop=z")
    tokenizer = load_tokenizer(shop / "model")
    engine = HFEngine(
        device=torch.device("cpu"), max_length=128, decode=lambda ids: tokenizer.decode(list(ids))
    )
    engine.update_weights(SharedModule(load_policy(shop / "model", dtype=torch.float64)), 0)
    params = SamplingParams(
        max_tokens=LENGTH, top_p=0.9, stop=("z",), stop_token_ids=(tokenizer.eos_token_id,), seed=5
    )
    prompts = [tokenizer.encode(row["prompt"][0]["content"]) for row in rows]
    requests = [Request(str(r), i, np.array(ids), params) for r, ids in enumerate(prompts) for i in range(N)]
    samples = {sample.id: sample for sample in generate(engine, requests)}
    source = pq.read_table(shop / "in.parquet").to_pylist()
    for number, (row, given) in enumerate(zip(rows, source, strict=True)):
        expected = [samples[str(number), i] for i in range(N)]
        assert {name: row[name] for name in given} == given
        assert row["response_ids"] == [sample.token_ids.tolist() for sample in expected]
        assert row["finish_reasons"] == [sample.finish_reason for sample in expected]
        for found, sample in zip(row["response_log_probs"], expected, strict=True):
            np.testing.assert_allclose(found, sample.log_probs, atol=1e-6)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in row["response_ids"]]
        assert row["responses"] == texts
    assert {reason for row in rows for reason in row["finish_reasons"]} == {"stop", "length"}


def test_conversations_texts_and_ids_in_parquet_and_json_lines(shop, tmp_path):
    tokenizer = load_tokenizer(shop / "model")
    questions = [row["prompt"][0]["content"] for row in pq.read_table(shop / "in.parquet").to_pylist()]
    write_rows(tmp_path / "ids.parquet", [{"tokens": tokenizer.encode(text)} for text in questions])
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(questions)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    chats = run(shop, tmp_path / "a.jsonl")
    texts = run(shop, tmp_path / "b.jsonl", "data.prompt_key=text", data=str(tmp_path / "texts.jsonl"))
    ids = run(shop, tmp_path / "c.parquet", "data.prompt_key=tokens", data=str(tmp_path / "ids.parquet"))
    for column in ("responses", "response_ids", "finish_reasons"):
        assert [r[column] for r in chats] == [r[column] for r in texts] == [r[column] for r in ids]
    assert [row["id"] for row in texts] == list(range(ROWS))


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(shop, tmp_path, monkeypatch, capsys):
    slow = ("rollout.max_num_seqs=2", "rollout.temperature=0.8")
    undisturbed = run(shop, tmp_path / "whole.parquet", *slow)
    out = tmp_path / "out.parquet"
    journal = tmp_path / "out.parquet.work.jsonl"
    done = kill_half_way(words(shop, out, *slow), journal, pieces=ROWS * N // 3)
    assert not out.exists()
    assert 0 < done < ROWS * N
    appended: list[Any] = []
    append = Journal.append

    def noted(journal: Journal, entries: Any) -> None:
        new = list(entries)
        appended.extend(new)
        append(journal, new)

    monkeypatch.setattr(Journal, "append", noted)
    assert run(shop, out, *slow) == undisturbed
    assert f"{done} responses already exist" in capsys.readouterr().err
    assert len(appended) == len({(each["row"], each["sample"]) for each in appended}) == ROWS * N - done
    assert not journal.exists()


def unfinished(shop: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the unfinished work of a run that ended with an error."""
    with monkeypatch.context() as patch:
        patch.setattr("tandem.offline.generate.write_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(words(shop, out))


NEW = ("responses", "response_ids", "response_log_probs", "finish_reasons")


def test_work_of_other_settings_is_refused(shop, tmp_path, monkeypatch, refused):
    out = tmp_path / "out.parquet"
    unfinished(shop, out, monkeypatch)
    said = refused(*words(shop, out, "rollout.n=2"))
    assert "rollout.n=2" in said and "rollout.n=3" in said and "--overwrite" in said
    other = write_rows(tmp_path / "other.parquet", [problem(a, 8) for a in range(3, 3 + ROWS)])
    assert "data.path (prompts)=" in refused(*words(shop, out, data=str(other)))
    # Settings for speed may change. All work is done, so no engine is made.
    with monkeypatch.context() as patch:
        patch.setattr("tandem.offline.generate.make_rollout_engine", lambda *_, **__: 1 / 0)
        whole = run(shop, out, "rollout.max_num_seqs=1")
    assert run(shop, out, "rollout.n=2", "--overwrite") == [
        {name: value[:2] if name in NEW else value for name, value in row.items()} for row in whole
    ]


BYTES = "image: binary cannot be written as JSON"
ROWS_REFUSED = {
    "clash": ([{"responses": "2"}], ["responses: the data already have a column"]),
    "bytes": ([{"image": b"\x00"}], [BYTES]),
    "nested": ([{"image": None}, {"image": [{"raw": b"\x00"}]}], [BYTES]),  # the first row does not show it
    "ids": ([{"prompt": [3]}, {"prompt": []}, {"prompt": [-1]}],
            ["row 1: prompt: not a list of at least one token id", "row 2: prompt: a negative"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS_REFUSED)
def test_rows_that_it_refuses(shop, tmp_path, refused, name):
    rows, telling = ROWS_REFUSED[name]
    data = write_rows(tmp_path / "rows.parquet", [{"prompt": "1+1=", **row} for row in rows])
    said = refused(*words(shop, tmp_path / "fresh.jsonl", data=str(data)))
    assert all(text in said for text in telling)
    assert not list(tmp_path.glob("fresh*"))


def test_what_it_refuses(shop, tmp_path, refused):
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    assert "the output already exists" in refused(*words(shop, out))
    assert out.read_text() == "mine\n"
    assert "did you mean rollout.temperature?" in refused(*words(shop, out, "rollout.temprature=1"))
    assert "data.path: this file does not exist" in refused(*words(shop, out, data="none.parquet"))
    assert "ends in .parquet or .jsonl" in refused(*words(shop, tmp_path / "out.csv"))


def test_verls_names_work(shop, tmp_path, typed):
    given = words(shop, tmp_path / "o.jsonl", "data.n_samples=2", "rollout.response_length=9", "--dry-run")
    status, shown, said = typed(*(w for w in given if not w.startswith(("rollout.n=", "data.max_resp"))))
    assert status == 0 and "n: 2" in shown and "max_response_length: 9" in shown
    assert "data.n_samples is rollout.n=2 here." in said


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("generate", ["model.path=model"], "in.parquet model out.jsonl"),
        ("eval", ["model.path=model"], "model in.parquet out.json"),
        ("eval", [], "in.parquet out.json"),
    ],
)
def test_the_first_line_comes_before_slow_imports(shop, command, words, said, monkeypatch, capsys):
    class Loaded(Exception):
        """A stand-in for a slow import."""

    def load(name: str) -> None:
        raise Loaded

    monkeypatch.chdir(shop)
    monkeypatch.setattr(f"tandem.cli.{command}.import_module", load)
    with pytest.raises(Loaded):
        main([command, *words, "data.path=in.parquet", f"data.output_path={said.split()[-1]}"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert [word.strip(";,") for word in last.split() if word.strip(";,") in said.split()] == said.split()


def test_what_is_left_to_write_is_said_before_the_model_is_loaded(shop, tmp_path, typed):
    _, _, said = typed(*words(shop, tmp_path / "out.jsonl", "data.max_response_length=4"))
    assert said.index("36 responses to generate; loading the model\n") < said.index("36/36 samples in ")
