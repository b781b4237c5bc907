"""Read runs, generate responses and evaluate models from Python."""

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
        """Export the newest or the best checkpoint as a folder that transformers can load.

        Args:
            folder: the folder to write; it must not exist, or must be empty.
            best: whether to export the best checkpoint instead of the newest.
            options: options of `tandem.offline.export.export_checkpoint`.

        Raises:
            CheckpointError: the run has no checkpoint.
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
        """Repeat a step, like `tandem replay`, and return the values that `tandem replay --json` prints.

        Args:
            step: number of the step; None: the last completed step.
            rewards: a reward function, or its `file.py:function`, that replaces the recorded scores.
            without: uids of prompts, or of single samples (`uid#sample`), to leave out.
            attribute: whether to split the gradient into shares of samples and tokens.
            config: changed config keys of the update, to compare the changed step with the original step.

        Raises:
            TandemError: the run folder lacks data for the replay, or a changed key does not affect the
                update.
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
    """Return the run in a folder, whether it is still running or has ended.

    Raises:
        DataError: the folder is not a run folder.
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
    """Generate responses to prompts with a model, like `tandem generate`.

    Args:
        model: a Hugging Face folder.
        prompts: rows with a `prompt` (see `tandem.train`), or a list of texts.
        n: number of responses per prompt.
        out: file for the responses, .parquet or .jsonl. If a call is interrupted, the same call continues
            from this file. None: no file is kept.
        overwrite: whether to replace an existing file.
        config: other keys of `tandem generate`.

    Returns:
        the rows, each with `responses`, `response_ids`, `response_log_probs` and `finish_reasons`, which are
        lists of length n.

    Raises:
        TandemError: an argument is invalid.
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
    """Measure the accuracy, pass@k and maj@k of a model, like `tandem eval`.

    Args:
        model: a Hugging Face folder; None if the rows already have `responses`.
        rows: problems with a `prompt` and the columns that the reward functions read; see `tandem.train`.
        rewards: reward functions, see `tandem.train`.
        n: number of responses per row.
        out: JSON file for the report; None: no file is kept.
        overwrite: whether to replace an existing file.
        config: other keys of `tandem eval`.

    Returns:
        a dict from data source to `problems`, `responses` and `measures`. Each measure has value, low and
        high.

    Raises:
        TandemError: an argument is invalid.
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
    """Yield the folder for files with rows and functions.

    With `out`, the folder is next to the output, where a repeated call finds it. Otherwise the folder is
    temporary.
    """
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
