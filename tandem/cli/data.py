"""`tandem data validate|convert|show|split|dedupe …`"""

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
    """Print all works, where help was asked for.

    Raises:
        ConfigError: something else was.
    """
    word = next(iter(arguments), None)
    if word not in ("-h", "--help"):
        raise ConfigError("no such work on data", got=word or None, expected=", ".join(ACTIONS))
    lines = [f"  {example}\n      {described(work)[0]}" for work, example in ACTIONS.values()]
    print("\n".join(["usage: tandem data WORK …", "", *lines, "", "tandem data WORK --help says more."]))
    return 0


def _validate(words: list[str], sft: bool = False, rm: bool = False, allow: list[str] | None = None) -> None:
    """Says everything that is wrong with rows, with their numbers: from 0 as in the messages of training,
    and the line in a text file. Exit status 1 where there is anything. With a model
    (actor_rollout_ref.model.path=…; with --sft and --rm model.path=…) tokens are counted too.

    Args:
        words: data files, and key=value words as of the training
        sft: rows of `tandem sft`, not of `tandem train`
        rm: rows of `tandem rm`
        allow: duplicate or role: rows that training takes are no problem
    """
    module = import_module("tandem.offline.validate")
    if sft and rm:
        raise ConfigError("one or the other", field="--sft, --rm", got="both")
    if wrong := set(allow or ()) - set(module.ALLOWED):
        raise ConfigError("cannot be allowed", got=", ".join(wrong), expected=" or ".join(module.ALLOWED))
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
    """Writes rows of a known format as rows that training reads: gsm8k, math, deepmath, dapo and table (any
    columns of prompts and answers) for `tandem train`, sharegpt and alpaca for sft, preference for rm.

    Args:
        source: data file, folder, pattern, or hf:OWNER/NAME?…
        output: file to write, .parquet or .jsonl
        form: the format; found by the columns unless named
        columns: prompt=YOURS,answer=YOURS: the format's columns in IN
        data_source: data_source of all rows
        instruction: put after each question; the format has its own
        skip: leave out rows that cannot be converted
        overwrite: replace files that are there
    """
    module = import_module("tandem.offline.convert")
    _check_outputs([output], overwrite)
    pairs = [pair.partition("=") for pair in columns.split(",") if pair]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2])]:
        raise ConfigError("no pair", field="--columns", got=wrong[0], expected="NAME=YOURS,NAME=YOURS")
    settings = module.Settings({name: theirs for name, _, theirs in pairs}, data_source, instruction, skip)
    files = files_of(source)
    named = form or module.detect(files, settings.columns)
    if named not in module.FORMATS:
        raise ConfigError("unknown", field="--from", got=named, expected=", ".join(module.FORMATS))
    table, left_out = module.convert(files, named, settings)
    write_rows(output, table, {})
    without = f", {left_out:,} left out" if left_out else ""
    found = "" if form else f"the columns are those of {named}; "
    say(f"{found}wrote {output}: {len(table):,} rows for `tandem {module.FORMATS[named].reader}`{without}")


def _show(words: list[str], n: Annotated[int, typer.Option("--n", min=0)] = 2, full: bool = False) -> None:
    """Shows what is in data files: rows, columns, data sources, lengths, examples. With a model
    (actor_rollout_ref.model.path=…) lengths are of tokens, and the first prompt is as the model gets it.

    Args:
        words: data files, and key=value words as of the training
        n: examples
        full: long texts to their end
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
    """The token ids of values that stand in rows, in the form in which a model gets them.

    Args:
        options: of the chat template.
    """
    template = import_module("tandem.data.chat").ChatTemplate(tokenizer, options)

    def pieces(value: Any) -> Any:
        """Texts, or token ids."""
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
    """Divides rows by chance: a share of each data source goes to OUT_B, the rest to OUT_A. Rows whose
    prompts are the same but for blanks and case stay together, and all keep their order.

    Args:
        source: data file, folder, pattern, or hf:OWNER/NAME?…
        most: file to write
        part: file to write the share to
        share: of each data source's rows that go to OUT_B
        seed: the same seed gives the same files
        overwrite: replace files that are there
    """
    if not 0 < share < 1:
        raise ConfigError("out of range", field="--share", got=share, expected="a number between 0 and 1")
    _check_outputs([most, part], overwrite)
    rows = read_files(files_of(source), (), optional=None)
    chosen = import_module("tandem.offline.parts").split(rows, share, seed)
    if chosen.all() or not chosen.any():
        raise DataError(
            "one side would have no rows", field=rows.names, got=f"{len(rows)} rows", remedy="another --share"
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
    """Leaves out rows that repeat an earlier one but for blanks and case, or nearly: most of their word
    n-grams are shared, and all numbers. With --against also those whose prompt is in other data.

    Args:
        source: data file, folder, pattern, or hf:OWNER/NAME?…
        output: file to write, .parquet or .jsonl
        against: data whose prompts no row may have, nor nearly
        ngram: words of an n-gram; 0: only rows that are the same
        overlap: share of n-grams in common from which texts are near
        overwrite: replace files that are there
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
        raise DataError("no row would be left", field=rows.names)
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
            raise ConfigError("no such folder", field=str(path), got=path.parent)
        if path.exists() and not overwrite:
            raise ConfigError("is there already", field=str(path), remedy="name another, or add --overwrite")
    if len(set(paths)) < len(paths):
        raise ConfigError("named twice", field=str(paths[0]))


def _config(words: Sequence[str], root: Any = TrainConfig) -> Any:
    """The config that key=value words give, the other words being its files."""
    files = [word for word in words if not _KEY.match(word)]
    if not files:
        raise ConfigError("no data file is named", expected="FILE … key=value …")
    keys = [word for word in words if _KEY.match(word)]
    return load_data_config(root, [f"data.train_files={json.dumps(files)}", *keys])


def _tokenizer(config: Any) -> Any:
    """That of the model; None where none is named."""
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
