"""Runs that are read, and models that answer, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tandem.api.arguments import INPUTS, Config, Rewards, reference, reward_keys, split_config, words
from tandem.api.rows import Rows, data_files
from tandem.config.load import load_eval_config, load_generate_config
from tandem.lifetime import scratch_folder
from tandem.observability import reading
from tandem.observability.terminal import say
from tandem.texts import parse_json


class Run(reading.Run):
    __doc__ = reading.Run.__doc__

    def export(self, folder: str | Path, *, best: bool = False, **options: Any) -> Path:
        """Writes the newest checkpoint, or the best, as a folder that transformers loads.

        Args:
            folder: must not exist or be empty.
            options: of `tandem.offline.export.export_checkpoint`.

        Raises:
            CheckpointError: there is none.
        """
        export = import_module("tandem.offline.export").export_checkpoint
        written: Path = export(self.path, Path(folder), best=best, **options)
        return written

    def replay(
        self,
        step: int | None = None,
        *,
        rewards: Callable[..., Any] | str | None = None,
        without: Sequence[str] = (),
        attribute: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Takes a step again, as `tandem replay` does, and returns what it prints with --json.

        Args:
            step: the last one done, where none is given.
            rewards: a reward function in place of the recorded scores, or its `file.py:function`.
            without: prompts' uids, or single samples, `uid#sample`, that are left out.
            attribute: take the gradient apart by samples and tokens.
            config: keys of what is learnt from given samples, for a changed step beside the one it was.

        Raises:
            TandemError: the folder lacks what it takes, or a change is of something else.
        """
        replay_found = import_module("tandem.trainer.replay_report").replay_found
        with scratch_folder("call") as scratch:
            reward = reference(rewards, scratch) if callable(rewards) else rewards
            found: dict[str, Any] = replay_found(
                self,
                self.steps if step is None else step,
                words(config or {}, scratch),
                reward,
                tuple(without),
                attribute=attribute,
            )
        return found


def open(folder: str | Path) -> Run:
    """The run in a folder, alive or ended.

    Raises:
        DataError: there is no run.
    """
    return Run(folder)


def generate(
    model: str | Path,
    prompts: Rows,
    *,
    n: int = 1,
    out: str | Path | None = None,
    overwrite: bool = False,
    config: Config = None,
) -> list[dict[str, Any]]:
    """Answers prompts with a model, as `tandem generate` does, and returns the rows with what it wrote.

    Args:
        model: a Hugging Face folder.
        prompts: rows with a `prompt`, see `tandem.train`; or a list of texts.
        n: responses to each.
        out: the file of the responses, .parquet or .jsonl, which also goes on from a broken-off call; None:
            none is kept.
        overwrite: replace it.
        config: further keys of `tandem generate`.

    Returns:
        the rows, each with `responses`, `response_ids`, `response_log_probs`, `finish_reasons`: lists of n.

    Raises:
        TandemError: anything that is wrong with these.
    """
    file, keys = split_config(config)
    generate_file = import_module("tandem.offline.generate").generate_file
    with _inputs(out) as inputs:
        given = {
            "model.path": str(model),
            "data.path": _one_file(prompts, inputs),
            "data.output_path": str(inputs / "responses.parquet" if out is None else out),
            "rollout.n": n,
            **keys,
        }
        loaded = load_generate_config(file, words(given, inputs))
        path = generate_file(loaded.config, overwrite=overwrite, say=say)
        if path.suffix == ".jsonl":
            return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows


def evaluate(
    model: str | Path | None,
    rows: Rows,
    *,
    rewards: Rewards = None,
    n: int = 1,
    out: str | Path | None = None,
    overwrite: bool = False,
    config: Config = None,
) -> Mapping[str, Any]:
    """Measures how well a model answers, as `tandem eval` does: accuracy, pass@k, maj@k.

    Args:
        model: a Hugging Face folder; None: the rows have `responses`.
        rows: see `tandem.train`.
        rewards: reward functions, see `tandem.train`.
        n: responses to each.
        out: the JSON file of the report; None: none is kept.
        overwrite: replace it.
        config: further keys of `tandem eval`.

    Returns:
        by data source: `problems`, `responses` and `measures`, each with value, low and high.

    Raises:
        TandemError: anything that is wrong with these.
    """
    file, keys = split_config(config)
    evaluate_file = import_module("tandem.offline.eval").evaluate_file
    with _inputs(out) as inputs:
        given = {
            "model.path": None if model is None else str(model),
            "data.path": _one_file(rows, inputs),
            "data.output_path": str(inputs / "report.json" if out is None else out),
            "rollout.n": n if model is not None else None,
            **reward_keys(rewards, inputs),
            **keys,
        }
        loaded = load_eval_config(file, words(given, inputs))
        sources = evaluate_file(loaded.config, overwrite=overwrite, say=say)
    return {name: asdict(source) for name, source in sources.items()}


@contextmanager
def _inputs(out: str | Path | None) -> Iterator[Path]:
    """The folder of rows and functions: beside the output, where the same call goes on, or passing."""
    if out is not None:
        yield Path(out).parent / INPUTS
        return
    with scratch_folder("call") as scratch:
        yield scratch


def _one_file(rows: Rows, folder: Path) -> str:
    are_texts = isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows)
    if are_texts and not Path(rows[0]).is_file():
        rows = [{"prompt": row} for row in rows]
    (path,) = data_files(rows, folder, "rows")
    return path
