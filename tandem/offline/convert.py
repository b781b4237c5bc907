"""Convert published datasets to rows for training (`tandem data convert`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from tandem.data.examples import PreferenceForm, turns_problem
from tandem.data.files import CHUNK_ROWS, DataFiles, read_files
from tandem.data.forms import PromptForm
from tandem.data.validate import RowProblems, conversation_problem, kind
from tandem.errors import ConfigError, DataError
from tandem.offline.faults import UNREWARDED, conversation_faults, reward_faults
from tandem.rewards.boxes import last_boxed

Row = Mapping[str, Any]
_SPEAKERS = {"human": "user", "observation": "tool", **dict.fromkeys(("gpt", "chatgpt", "bot"), "assistant")}
_HUMAN = re.compile(r"\n\n(Human|Assistant):")
_BOXED = "Put the final answer in \\boxed{}."
_CONVERSATIONS = PreferenceForm(("chosen", "rejected"), None, None, texts=False).problem


class Unfit(ValueError):
    """Raised for a row that cannot be converted. The text is the reason."""


@dataclass(frozen=True)
class Settings:
    """The user's options for a conversion.

    Attributes:
        columns: a dict from the format's name of a column to the file's name.
        source: the data source of all rows; None: the source in the row, or the format's source.
        instruction: a text to add after each question; None: the format's text.
        skip: leave out rows that cannot be converted.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    instruction: str | None = None
    skip: bool = False


@dataclass(frozen=True)
class Format:
    """A published dataset format, and its conversion to rows for training.

    Attributes:
        columns: the columns that identify the format, all of which are required.
        convert: converts a row to a row for training, or to `Scored`. It raises Unfit if this is impossible.
        reader: the command that reads the converted rows.
    """

    columns: tuple[str, ...]
    convert: Callable[[Row, Settings], dict[str, Any] | Scored]
    reader: str = "train"


def convert(files: Sequence[str], form: str, settings: Settings) -> tuple[pa.Table, int]:
    """Convert files of a format to a table that training reads.

    Args:
        files: the files.
        form: the format, a key of `FORMATS`.
        settings: the options of the user.

    Returns:
        The table, and the number of rows that were left out.

    Raises:
        DataError: If columns are missing, or rows cannot be converted; the error names the rows.
    """
    chosen = FORMATS[form]
    needs = [settings.columns.get(name, name) for name in chosen.columns]
    needs += settings.columns.values()
    rows = read_files(files, needs, optional=None, keys=["--columns"])
    problems, tables = RowProblems(rows.where), []
    made = _converted(rows, chosen, settings, problems)
    while chunk := list(islice(made, CHUNK_ROWS)):
        tables.append(pa.Table.from_pylist(chunk))
    if not settings.skip or not tables:
        problems.raise_if_any(
            f"that cannot be converted from {form}",
            field=rows.names,
            expected=", ".join(chosen.columns),
            remedy="fix these rows, or leave them out with --skip; rows are counted from 0",
        )
    try:
        return pa.concat_tables(tables, promote_options="permissive"), problems.count
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            "a column has different types in different rows", field=rows.names, got=error
        ) from error


def detect(files: Sequence[str], columns: Mapping[str, str]) -> str:
    """Return the format of files, recognized by their columns.

    Args:
        files: the files.
        columns: the file's name of a column, by the format's name.

    Raises:
        ConfigError: If no format has these columns.
    """
    rows = read_files(files, (), optional=None)
    there = {*rows.columns, *columns}
    (first,) = rows.take([0])
    for name, form in FORMATS.items():
        unmarked = name == "gsm8k" and "####" not in str(first.get(columns.get("answer", "answer")))
        if there.issuperset(form.columns) and not unmarked:
            return name
    wanted = "; ".join(f"{name}: {', '.join(form.columns)}" for name, form in FORMATS.items())
    raise ConfigError(
        "the columns match no known format",
        field=rows.names,
        got=", ".join(rows.columns),
        expected=wanted,
        remedy="set the format with --from, and its columns with --columns prompt=YOURS,answer=YOURS",
    )


def _converted(
    rows: DataFiles, form: Format, settings: Settings, problems: RowProblems
) -> Iterator[dict[str, Any]]:
    for number, record in rows.records():
        row = {**record, **{name: record.get(theirs) for name, theirs in settings.columns.items()}}
        try:
            made = form.convert(row, settings)
            yield _scored(row, number, settings, made) if isinstance(made, Scored) else made
        except Unfit as error:
            problems.add(number, str(error))


class Scored(NamedTuple):
    """The converted values of a row for `tandem train`.

    `question` is a text or messages, and `truth` the ground truth. `source` is the data source of the format,
    if the format has a data source. `hint` is the text to add after each question. `keep` has the names of
    additional columns to keep.
    """

    question: Any
    truth: Any
    source: str | None = None
    hint: str = ""
    keep: Sequence[str] = ()


def _scored(row: Row, number: int, settings: Settings, made: Scored) -> dict[str, Any]:
    """Build a row for `tandem train` from the converted values of a row."""
    question, truth = made.question, made.truth
    hint = made.hint if settings.instruction is None else settings.instruction
    name = settings.source or row.get("data_source") or made.source
    prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if not name:
        raise Unfit("no data_source, which selects the reward; set one with --source")
    if problem := conversation_problem(prompt):
        raise Unfit(f"prompt: {problem}")
    _refuse(conversation_faults("prompt", prompt))
    if truth is None:
        raise Unfit("no answer")
    if hint:
        prompt = [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{hint}"}]
    own = row.get("extra_info")
    kept = {key: row[key] for key in made.keep if key in row}
    scored = {
        "data_source": str(name),
        "prompt": prompt,
        "ability": str(row.get("ability") or "math"),
        "reward_model": {"style": "rule", "ground_truth": truth if isinstance(truth, list) else str(truth)},
        "extra_info": {"index": number, **kept, **(own if isinstance(own, Mapping) else {})},
    }
    _refuse(reward_faults(scored, PromptForm()))
    return scored


def _refuse(found: Iterable[tuple[str, str]]) -> None:
    """Raise Unfit for problems that validation would report, except a missing reward function."""
    for fault, problem in found:
        if fault != UNREWARDED:
            raise Unfit(problem)


def _gsm8k(row: Row, settings: Settings) -> Scored:
    _, marker, answer = str(row["answer"]).rpartition("####")
    truth = answer.strip().replace(",", "") if marker else None
    hint = 'Give the final number after "####".'
    return Scored(row["question"], truth, "openai/gsm8k", hint, ("question", "answer"))


def _math(row: Row, settings: Settings) -> Scored:
    truth = row.get("answer")
    truth = last_boxed(str(row["solution"])) if truth is None else truth
    source = "DigitalLearningGmbH/MATH-lighteval"
    return Scored(row["problem"], truth, source, _BOXED, ("level", "type", "subject"))


def _deepmath(row: Row, settings: Settings) -> Scored:
    return Scored(row["question"], row["final_answer"], "MATH", _BOXED, ("difficulty", "topic"))


def _dapo(row: Row, settings: Settings) -> Scored:
    model = row["reward_model"]
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    return Scored(row.get("source_prompt") or row["prompt"], truth, "math_dapo")


def _table(row: Row, settings: Settings) -> Scored:
    used = {"prompt", "answer", "data_source", "ability", "extra_info", *settings.columns.values()}
    return Scored(row["prompt"], row["answer"], keep=[name for name in row if name not in used])


def _sharegpt(row: Row, settings: Settings) -> dict[str, Any]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise Unfit(f"conversations: must be a list of turns, not {kind(turns)}")
    said = [
        (turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content")) for turn in turns
    ]
    messages = [{"role": _SPEAKERS.get(str(who), who), "content": text} for who, text in said]
    return _conversation(row, messages)


def _alpaca(row: Row, settings: Settings) -> dict[str, Any]:
    asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
    if not asked or not row["output"]:
        raise Unfit("no instruction" if not asked else "no output")
    answer = {"role": "assistant", "content": row["output"]}
    return _conversation(row, [{"role": "user", "content": asked}, answer])


def _conversation(row: Row, messages: list[dict[str, Any]]) -> dict[str, Any]:
    if row.get("system"):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    if problem := turns_problem(messages):
        raise Unfit(problem)
    _refuse(conversation_faults("messages", messages, ended=True))
    return {"messages": messages}


def _preference(row: Row, settings: Settings) -> dict[str, Any]:
    prompt = row.get("prompt")
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
    made: dict[str, Any] = {name: _answered(before, row[name]) for name in ("chosen", "rejected")}
    if problem := _CONVERSATIONS(made):
        raise Unfit(problem)
    _refuse(fault for name in made for fault in conversation_faults(name, made[name], ended=True))
    if made["chosen"] == made["rejected"]:
        raise Unfit("chosen and rejected are the same")
    margin = row.get("margin")
    return {**made, "margin": float(margin)} if isinstance(margin, int | float) else made


def _answered(before: list[Row], answer: Any) -> Any:
    """Return the conversation that ends with an answer.

    The answer is a text, the last turns, a whole conversation, or a dialogue as text with "Human:" and
    "Assistant:" before the turns.
    """
    if isinstance(answer, str) and before:
        return [*before, {"role": "assistant", "content": answer}]
    if isinstance(answer, str):
        parts = _HUMAN.split(answer)[1:]
        roles = ("user" if who == "Human" else "assistant" for who in parts[::2])
        return [
            {"role": role, "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)
        ]
    first = answer[0] if isinstance(answer, list) and answer else None
    is_end = isinstance(first, Mapping) and first.get("role") == "assistant"
    return [*before, *answer] if is_end else answer


FORMATS: Mapping[str, Format] = {
    "dapo": Format(("prompt", "reward_model"), _dapo),
    "sharegpt": Format(("conversations",), _sharegpt, "sft"),
    "preference": Format(("chosen", "rejected"), _preference, "rm"),
    "alpaca": Format(("instruction", "output"), _alpaca, "sft"),
    "deepmath": Format(("question", "final_answer"), _deepmath),
    "gsm8k": Format(("question", "answer"), _gsm8k),
    "math": Format(("problem", "solution"), _math),
    "table": Format(("prompt", "answer"), _table),
}
"""The formats, in the order in which `detect` tries them."""
