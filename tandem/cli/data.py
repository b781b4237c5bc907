"""The commands `tandem data validate`, `convert`, `show`, `split` and `dedupe`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.samples import LONGEST, framed
from tandem.cli.signals import import_module
from tandem.cli.typed import Works, described, run_work
from tandem.config.data_files import files_of
from tandem.config.load import load_data_config
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.data.files import read_files
from tandem.data.rows import write_rows
from tandem.errors import ConfigError, DataError
from tandem.observability.terminal import say

Source = Annotated[str, typer.Argument(metavar="IN")]
Output = Annotated[Path, typer.Argument(metavar="OUT")]
SUFFIXES = (".parquet", ".jsonl")
_KEY = re.compile(r"[+~]{0,2}\w+(\.\w+)+=|~")


def data(arguments: list[str]) -> int:
    return run_work("data", ACTIONS, arguments, _overview)


def _overview(arguments: list[str]) -> int:
    """Print all subcommands if the arguments request help.

    Raises:
        ConfigError: the arguments do not request help.
    """
    word = next(iter(arguments), None)
    if word not in ("-h", "--help"):
        raise ConfigError(
            "unknown subcommand of `tandem data`" if word else "`tandem data` needs a subcommand",
            got=word,
            expected=f"one of {', '.join(ACTIONS)}",
            remedy="run `tandem data --help`",
        )
    lines = [f"  {example}\n      {described(work)[0].splitlines()[0]}" for work, example in ACTIONS.values()]
    print(
        "\n".join(
            [
                "usage: tandem data SUBCOMMAND …",
                "",
                *lines,
                "",
                "`tandem data SUBCOMMAND --help` shows the options.",
            ]
        )
    )
    return 0


def _validate(words: list[str], sft: bool = False, rm: bool = False, allow: list[str] | None = None) -> None:
    """Check data files and report everything that is wrong, with row numbers.

    Rows count from 0, as in the messages of training; for a text file the line
    is given too. The exit status is 1 if there is any problem. If you name a
    model (actor_rollout_ref.model.path=…, or model.path=… with --sft and --rm),
    tokens are counted too.

    Args:
        words: data files, and settings as for the training (key=value)
        sft: check rows for `tandem sft`, not for `tandem train`
        rm: check rows for `tandem rm`
        allow: kind of problem that is not reported: duplicate (repeated rows)
            or role (unusual roles of messages); training accepts both
    """
    module = import_module("tandem.offline.validate")
    if sft and rm:
        raise ConfigError("these options exclude each other", field="--sft, --rm", got="both")
    if wrong := set(allow or ()) - set(module.ALLOWED):
        raise ConfigError(
            "--allow does not know this problem", got=", ".join(wrong), expected=" or ".join(module.ALLOWED)
        )
    root: Any = SFTConfig if sft else RMConfig if rm else TrainConfig
    config = _config(words, root)
    files = config.data.train_files
    report = module.Report(say, len(files) > 1, allow or ())
    module.validate(config, _tokenizer(config), report)
    if report.kinds:
        kinds = [f"{count:,} × {kind}" for kind, count in report.kinds.most_common()]
        raise DataError(
            f"{report.kinds.total():,} problem(s) in {report.rows:,} row(s)",
            field=", ".join(files),
            got="\n            ".join(kinds),
        )
    say(f"no problem in {report.rows:,} row(s) of {', '.join(files)}")


def _convert(
    source: Source,
    output: Output,
    form: Annotated[str | None, typer.Option("--from")] = None,
    columns: str = "",
    data_source: Annotated[str | None, typer.Option("--source")] = None,
    instruction: str | None = None,
    skip: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert rows of a known format into rows that training reads.

    gsm8k, math, deepmath, dapo and table (any columns of prompts and answers)
    become rows for `tandem train`; sharegpt and alpaca become rows for `tandem
    sft`; preference becomes rows for `tandem rm`.

    Args:
        source: data file, folder, pattern, or hf:OWNER/NAME?…
        output: file to write, .parquet or .jsonl
        form: the format of IN; default: recognized by its columns
        columns: the names of your columns in IN, as
            prompt=YOURS,answer=YOURS
        data_source: value of data_source for all rows
        instruction: text to add after each question; default: the format's own
        skip: leave out rows that cannot be converted
        overwrite: replace files that exist
    """
    module = import_module("tandem.offline.convert")
    _check_outputs([output], overwrite)
    pairs = [pair.partition("=") for pair in columns.split(",") if pair]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2])]:
        raise ConfigError(
            "this is not a pair", field="--columns", got=wrong[0], expected="NAME=YOURS,NAME=YOURS"
        )
    settings = module.Settings({name: theirs for name, _, theirs in pairs}, data_source, instruction, skip)
    files = files_of(source)
    named = form or module.detect(files, settings.columns)
    if named not in module.FORMATS:
        raise ConfigError("unknown format", field="--from", got=named, expected=", ".join(module.FORMATS))
    table, left_out = module.convert(files, named, settings)
    write_rows(output, table, {})
    without = f", {left_out:,} left out" if left_out else ""
    found = "" if form else f"the columns are those of {named}; "
    say(f"{found}wrote {output}: {len(table):,} rows for `tandem {module.FORMATS[named].reader}`{without}")


def _show(words: list[str], n: Annotated[int, typer.Option("--n", min=0)] = 2, full: bool = False) -> None:
    """Show the rows, columns, data sources, lengths and examples of data files.

    If you name a model (actor_rollout_ref.model.path=…), lengths are counted in
    tokens, and the first prompt is shown as the model gets it.

    Args:
        words: data files, and settings as for the training (key=value)
        n: number of examples
        full: show long texts in full
    """
    module = import_module("tandem.offline.show")
    config = _config(words)
    rows = read_files(config.data.train_files, (), optional=None)
    tokenizer, key = _tokenizer(config), config.data.prompt_key
    for line in module.summary(rows, config.data.reward_fn_key):
        say(line)
    as_ids = partial(_as_ids, tokenizer, config.data.apply_chat_template_kwargs) if tokenizer else None
    count = None if as_ids is None else lambda values: list(map(len, as_ids(values)))
    for line in module.lengths(rows, key, count):
        say(line)
    for row, record in islice(rows.records(), n):
        say(f"── {rows.where(row)}")
        for name, value in record.items():
            say(f"{name}:\n{framed(module.plain(value), None if full else LONGEST)}", end="")
    if as_ids is not None and key in rows.columns:
        (first,) = rows.take([0])
        (ids,) = as_ids([first[key]])
        say(f"── the first prompt as the model gets it, {len(ids):,} tokens")
        say(framed(tokenizer.decode(ids), None), end="")
        for line in module.pieces(tokenizer, ids):
            say(line)


def _as_ids(tokenizer: Any, options: Mapping[str, Any], values: Sequence[Any]) -> list[list[int]]:
    """Return the token ids of prompts or responses in rows, formatted as for a model.

    Args:
        tokenizer: the model's tokenizer.
        options: options of the chat template.
        values: texts, conversations or token ids.
    """
    template = import_module("tandem.data.chat").ChatTemplate(tokenizer, options)

    def pieces(value: Any) -> Any:
        """Return a value as a formatted text or token ids."""
        if isinstance(value, str):
            return template.prompt(value)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            answered = value[-1].get("role") == "assistant"
            return [(template.render(value, generation_prompt=not answered), False)]
        is_ids = isinstance(value, list) and all(isinstance(token, int) for token in value)
        return [(value, False)] if is_ids else []

    made = import_module("tandem.data.tokens").encoded(tokenizer, list(map(pieces, values)))
    return [[int(token) for part in parts for token in part] for parts in made]


def _split(
    source: Source,
    most: Annotated[Path, typer.Argument(metavar="OUT_A")],
    part: Annotated[Path, typer.Argument(metavar="OUT_B")],
    share: float = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    overwrite: bool = False,
) -> None:
    """Split rows at random into two files.

    A share of the rows of each data source goes to OUT_B, the rest to OUT_A.
    Rows whose prompts differ only in whitespace and case go to the same file.
    All rows keep their order.

    Args:
        source: data file, folder, pattern, or hf:OWNER/NAME?…
        most: file to write
        part: file to write the share to
        share: share of each data source's rows that goes to OUT_B
        seed: the same seed gives the same files
        overwrite: replace files that exist
    """
    if not 0 < share < 1:
        raise ConfigError("out of range", field="--share", got=share, expected="a number between 0 and 1")
    _check_outputs([most, part], overwrite)
    rows = read_files(files_of(source), (), optional=None)
    chosen = import_module("tandem.offline.parts").split(rows, share, seed)
    if chosen.all() or not chosen.any():
        raise DataError(
            "one side would have no rows",
            field=rows.names,
            got=f"{len(rows)} rows",
            remedy="choose another --share",
        )
    for path, mask in ((most, ~chosen), (part, chosen)):
        write_rows(path, rows.table.filter(mask), {})
        say(f"wrote {path}: {mask.sum():,} rows")


def _dedupe(
    source: Source,
    output: Output,
    against: str | None = None,
    ngram: Annotated[int, typer.Option(min=0)] = 5,
    overlap: Annotated[float, typer.Option(min=0, max=1)] = 0.7,
    overwrite: bool = False,
) -> None:
    """Remove duplicate rows.

    A row is left out if it repeats an earlier row: the texts differ only in
    whitespace and case, or they share most word n-grams and all numbers. With
    --against, rows whose prompt occurs in other data are left out too.

    Args:
        source: data file, folder, pattern, or hf:OWNER/NAME?…
        output: file to write, .parquet or .jsonl
        against: data whose prompts, or near copies of them, must not occur in
            OUT
        ngram: words per n-gram; 0: remove only rows whose texts are the same
        overlap: two texts are near copies if they have at least this share of
            n-grams in common
        overwrite: replace files that exist
    """
    module = import_module("tandem.offline.parts")
    _check_outputs([output], overwrite)
    rows = read_files(files_of(source), (), optional=None)
    gone: dict[int, str] = {}
    if against is not None:
        other = read_files(files_of(against), (), optional=None)
        texts = [module.Texts(each, prompt=True) for each in (other, rows)]
        for one, later, shared in module.alike(texts, ngram, overlap):
            row = later - len(other)
            if one < len(other) <= later and gone.setdefault(row, "leaked") == "leaked":
                say(f"{rows.where(row)}: its prompt is in {against}, {other.where(one)}{_near(shared)}")
    for one, later, shared in module.alike([module.Texts(rows, prompt=False)], ngram, overlap):
        if later not in gone and (shared == 1 or one not in gone):
            gone[later] = "repeated" if shared == 1 else "near"
            say(f"{rows.where(later)}: repeats {rows.where(one)}{_near(shared)}")
    kept = [row for row in range(len(rows)) if row not in gone]
    if not kept:
        raise DataError("all rows would be left out", field=rows.names)
    write_rows(output, rows.table.take(kept), {})
    why = ", ".join(f"{count:,} {name}" for name, count in Counter(gone.values()).items())
    say(f"wrote {output}: {len(kept):,} of {len(rows):,} rows{f'; left out: {why}' if why else ''}")


def _near(shared: float) -> str:
    return "" if shared == 1 else f" ({shared:.2f} of their n-grams)"


def _check_outputs(paths: Sequence[Path], overwrite: bool) -> None:
    for path in paths:
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(
                "unknown format", field=str(path), expected=f"a name in {' or '.join(SUFFIXES)}"
            )
        if not path.parent.is_dir():
            raise ConfigError("the folder of this file does not exist", field=str(path), got=path.parent)
        if path.exists() and not overwrite:
            raise ConfigError(
                "this file exists", field=str(path), remedy="choose another name, or add --overwrite"
            )
    if len(set(paths)) < len(paths):
        raise ConfigError("this file is named twice", field=str(paths[0]))


def _config(words: Sequence[str], root: Any = TrainConfig) -> Any:
    """Return the config for key=value words. All other words are data files."""
    files = [word for word in words if not _KEY.match(word)]
    if not files:
        raise ConfigError("no data file is named", expected="FILE … key=value …")
    keys = [word for word in words if _KEY.match(word)]
    return load_data_config(root, [f"data.train_files={json.dumps(files)}", *keys])


def _tokenizer(config: Any) -> Any:
    """Return the tokenizer of the config's model; None if the config has no model."""
    model = config.actor_rollout_ref.model if isinstance(config, TrainConfig) else config.model
    if not model.path:
        return None
    return import_module("tandem.models.loading").load_tokenizer(
        model.tokenizer_path,
        custom_chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )


ACTIONS: Works = {
    "validate": (_validate, "tandem data validate train.parquet val.jsonl data.max_prompt_length=512"),
    "convert": (_convert, "tandem data convert gsm8k/train.parquet train.parquet --from gsm8k"),
    "show": (_show, "tandem data show train.parquet --n 3 actor_rollout_ref.model.path=MODEL"),
    "split": (_split, "tandem data split all.parquet train.parquet val.parquet --share 0.1 --seed 1"),
    "dedupe": (_dedupe, "tandem data dedupe train.parquet clean.parquet --against val.parquet"),
}
