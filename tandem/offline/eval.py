"""Evaluate a model, or the responses in a file (`tandem eval`).

Responses are scored as they finish. Responses and scores are written to journals next to the report, so a run
that was killed can continue. Measures are averaged over problems with equal weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tandem.config.generate import EvalConfig, EvalDataConfig
from tandem.config.written import to_dict
from tandem.data.files import read_files
from tandem.data.forms import PARAMETERS, UNNAMED
from tandem.data.rows import check_new_columns, json_line, write_rows
from tandem.data.validate import RowProblems, kind, reward_problem
from tandem.errors import ConfigError
from tandem.observability.files import replace_file
from tandem.observability.journal import Journal
from tandem.observability.progress import Progress
from tandem.offline.generate import COLUMNS, Offline, alone, beside, check_new_outputs
from tandem.offline.measures import Source, Verdict, measure
from tandem.protocol import Sample
from tandem.rewards import Item, Pool, Scorer, check_sources, own_reward
from tandem.rewards.signatures import VERLS

_TEXTS = pa.list_(pa.string())
SCORE_COLUMNS = {
    "scores": ("score", None),
    "right": ("right", None),
    "answers": ("answer", _TEXTS),
    "reward_why": ("why", _TEXTS),
}
"""The columns that are added to each row: a dict from name to (field of the verdict, type).

Each value is a list with one entry per response.
"""

_SCORED_AT_ONCE = 16


class Response(NamedTuple):
    """A response to a row. `sample` is the response's number among the responses to the row."""

    row: int
    sample: int
    text: str


@dataclass(frozen=True)
class Responses:
    """A source of responses.

    Attributes:
        table: the rows, with all columns.
        where: a function from a row number to the row's name, for messages.
        counts: (P) the number of responses to each row.
        settings: the settings that affect the responses.
        parts: yields all responses, in lists.
        columns: returns the additional columns to write; called after the last list.
        journal: the stored responses of the model, for continuing.
    """

    table: pa.Table
    where: Callable[[int], str]
    counts: list[int]
    settings: dict[str, Any]
    parts: Iterator[list[Response]]
    columns: Callable[[], dict[str, pa.Array]] = dict
    journal: Journal | None = None


def _generated(
    config: EvalConfig, output: Path, overwrite: bool, say: Callable[[str], None], needs: Sequence[str]
) -> Responses:
    """Return a source of responses that a model generates now."""
    offline = Offline(config, say, needs)
    rows, settings, samples = offline.rows, offline.settings(), list[Sample]()
    journal = Journal(beside(output, "responses"), settings, overwrite=overwrite)

    def parts() -> Iterator[list[Response]]:
        for part in offline.samples(journal):
            samples.extend(part)
            yield [Response(int(each.uid), each.sample, offline.text(each)) for each in part]

    counts = [config.rollout.n] * len(rows)
    return Responses(
        rows.table, rows.where, counts, settings, parts(), lambda: offline.columns(samples), journal
    )


def _from_column(config: EvalConfig, needs: Sequence[str]) -> Responses:
    """Return a source of responses from a column of the data, with a text or list of texts per row."""
    data, name = config.data, config.data.response_key
    named = "data.reward_fn_key" if "reward_model" in needs else PARAMETERS
    keys, columns = ("data.response_key", named), (name, *needs)
    files = read_files(data.path, columns, optional=None, max_samples=data.max_samples, keys=keys)
    problems = RowProblems(files.where)
    given: list[list[str]] = []
    for row, value in enumerate(files.table[name].to_pylist()):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            problems.add(row, f"{name} is {kind(value)}, not a text or a list of texts")
        given.append(texts)
    problems.raise_if_any(
        "without responses",
        field=", ".join(data.path),
        expected=f"{name}: a text, or a list of texts as `tandem generate` writes them",
        remedy="fix these rows, or set data.response_key to another column",
    )

    def parts() -> Iterator[list[Response]]:
        every = [Response(row, i, text) for row, texts in enumerate(given) for i, text in enumerate(texts)]
        with Progress("score", len(every), unit="responses") as progress:
            for start in range(0, len(every), _SCORED_AT_ONCE):
                part = every[start : start + _SCORED_AT_ONCE]
                yield part
                progress.advance(len(part), len(part))

    settings = {"data.path (responses)": _hash(given)}
    return Responses(files.table, files.where, list(map(len, given)), settings, parts())


def evaluate_file(config: EvalConfig, *, overwrite: bool, say: Callable[[str], None]) -> dict[str, Source]:
    """Write the report to `config.data.output_path`, and the rows with scored responses next to it.

    Args:
        config: the config of the command.
        overwrite: replace these files, and delete the unfinished work of an earlier run.
        say: prints a sentence to the user.

    Returns:
        A dict from data source, and from "overall", to the measures.

    Raises:
        ConfigError: If there is unfinished work with other settings, a k is above the number of responses, or
            another process writes the report.
        DataError: If the data cannot be used, or one of the files already exists.
        ModelError: If the model cannot be used.
        EngineError: If the engine cannot be used.
        RewardError: If the reward cannot be used.
    """
    output = Path(config.data.output_path)
    with alone(output, "data.output_path", say):
        samples = output.with_suffix(".samples.parquet")
        journals = [beside(output, "scores"), *([beside(output, "responses")] if config.model.path else [])]
        check_new_outputs([output, samples], journals, overwrite)
        reward = own_reward(config.custom_reward_function, config.reward.timeout)
        reads = VERLS if reward is None else reward.reads
        renamed = {"data_source": config.data.reward_fn_key}
        needs = [renamed.get(name, name) for name in reads.needs if name != "prompt"]
        generates = bool(config.model.path)
        responses = (
            _generated(config, output, overwrite, say, needs) if generates else _from_column(config, needs)
        )
        check_new_columns(responses.table, list(SCORE_COLUMNS))
        problems = _problems(responses, config.data, reward)
        names = [problem.data_source for problem in problems]
        check_sources(set(names), reward, config.reward.sandbox, say)
        ks = _ks(config.eval.k, min(responses.counts))
        settings = responses.settings | _reward_settings(config, problems)
        journal = Journal(journals[0], settings, overwrite=overwrite)
        if journal.entries:
            say(f"{len(journal.entries)} responses are already scored; continuing with the others")
        with closing(Pool(reward, config.reward, output.with_suffix(".rewards.log"), say)) as pool:
            verdicts = _verdicts(responses, problems, pool, journal)
        if failed := pool.counts["failed"]:
            say(f"{failed} scores failed and count as 0 (reward.on_error)")
        sources = measure(verdicts, names, ks, config.eval, seed=config.trainer.seed)
        write_rows(samples, responses.table, responses.columns() | _columns(verdicts))
        measured = {name: asdict(source) for name, source in sources.items()}
        report = {"sources": measured, "config": to_dict(config)}
        replace_file(output, (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode())
        journal.remove()
        if responses.journal is not None:
            responses.journal.remove()  # last, because generation took the most work
        return sources


def _verdicts(
    responses: Responses, problems: Sequence[Item], pool: Pool, journal: Journal
) -> dict[int, list[Verdict]]:
    """Return a dict from problem number to the verdicts on its responses, in order.

    Responses whose verdicts are in the journal are not scored again.
    """
    found = {verdict[:2]: verdict for verdict in (Verdict(**entry) for entry in journal.entries)}
    waiting: list[Response] = []

    def score_waiting() -> None:
        items = [replace(problems[each.row], solution_str=each.text) for each in waiting]
        new = [
            Verdict(*each[:2], scored.score, scored.right, scored.answer, scored.reads_answers, scored.why)
            for each, scored in zip(waiting, pool.score(items), strict=True)
        ]
        journal.append(verdict._asdict() for verdict in new)
        found.update({verdict[:2]: verdict for verdict in new})
        waiting.clear()

    for part in responses.parts:
        waiting += [each for each in part if each[:2] not in found]
        if len(waiting) >= _SCORED_AT_ONCE and not (pool.reward and pool.reward.batched):
            score_waiting()
    score_waiting()
    by_problem: dict[int, list[Verdict]] = {}
    for place in sorted(found):
        by_problem.setdefault(place[0], []).append(found[place])
    return by_problem


def _problems(responses: Responses, data: EvalDataConfig, reward: Scorer | None) -> list[Item]:
    """Return an `Item` for each row, as the input of its reward function, without a response.

    Raises:
        DataError: If rows are invalid.
        RewardError: If a data source has no reward.
    """
    wrong = RowProblems(responses.where)
    items = []
    source_key, written = data.reward_fn_key, {data.response_key, *COLUMNS}
    scored = reward is None or "reward_model" in reward.reads.needs
    kept = [name for name in responses.table.column_names if name not in written]
    for row, record in enumerate(responses.table.select(kept).to_pylist()):
        problem = reward_problem(record, source_key) if scored else None
        if problem:
            wrong.add(row, problem)
            continue
        truth = (record.get("reward_model") or {}).get("ground_truth")
        columns = {**record, "prompt": record.get(data.prompt_key)}
        extra, source = record.get("extra_info") or {}, record.get(source_key, UNNAMED)
        items.append(Item(source, "", truth, extra, row, columns, str(row)))
    wrong.raise_if_any(
        "with the wrong form",
        field="data.path",
        expected=f"{source_key}: a name; reward_model: {{style, ground_truth}}; "
        "extra_info: a mapping, if present",
        remedy="fix or remove these rows; rows are counted from 0",
    )
    return items


def _ks(asked: Sequence[int], responses: int) -> list[int]:
    """Return the values of k to report, in ascending order.

    Raises:
        ConfigError: If a k is below 1 or above the number of responses.
    """
    wrong = [k for k in asked if not 1 <= k <= responses]
    if wrong:
        raise ConfigError(
            "k is out of range",
            field="eval.k",
            got=wrong[0],
            expected=f"1 to {responses}, the number of responses to a problem",
            remedy="increase rollout.n, or use a smaller k",
        )
    if asked:
        return sorted(set(asked))
    doubled = [1 << power for power in range(1, responses.bit_length())]
    return sorted({*doubled, responses} - {1})  # pass@1 equals the accuracy


def _reward_settings(config: EvalConfig, problems: Sequence[Item]) -> dict[str, Any]:
    """Return the settings that affect the scores, in addition to the responses."""
    custom = config.custom_reward_function
    files = [Path(path) for path in (custom.path, *(term.path for term in custom.terms)) if path]
    content = [path.read_bytes().hex() for path in files if path.is_file()]
    return {
        "data.path (ground truths)": _hash(
            [[item.data_source, item.ground_truth, item.extra_info] for item in problems]
        ),
        "custom_reward_function": to_dict(config)["custom_reward_function"],
        "custom_reward_function.path (content)": _hash(content),
    }


def _hash(value: Any) -> str:
    return hashlib.blake2b(json_line({"value": value}).encode(), digest_size=8).hexdigest()


def _columns(verdicts: Mapping[int, Sequence[Verdict]]) -> dict[str, pa.Array]:
    """Return the columns `SCORE_COLUMNS` of all rows."""
    problems = [verdicts[row] for row in range(len(verdicts))]
    return {
        column: pa.array([[getattr(verdict, field) for verdict in problem] for problem in problems], kind)
        for column, (field, kind) in SCORE_COLUMNS.items()
    }
