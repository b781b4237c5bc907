"""The command `tandem models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tandem.cli.typed import command
from tandem.errors import ConfigError
from tandem.models.families import Family, families, tried_with
from tandem.observability.terminal import say

COLUMNS = ("model_type", "training", "native", "LoRA", "tensor parallel", "experts")


@command
def models(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """List the architectures that Tandem can train, and what each can do.

    `tandem check --model DIR` tries out the model in a folder.

    Args:
        names: parts of model types, such as gemma; without names, all architectures are listed
    """
    known = families()
    found = [family for family in known if not names or any(name in family.name for name in names)]
    if not found:
        raise ConfigError(
            "no architecture has this name",
            got=", ".join(names or ()),
            expected="a part of a model_type, such as qwen or gemma",
            remedy="run `tandem check --model DIR` on the folder of your model",
        )
    lines = [COLUMNS, *map(cells, found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for family in found if names else ():
        if family.reason:
            say(f"{family.name}: {family.reason}")
    say(summary(known))


def cells(family: Family) -> Sequence[str]:
    """Return the cells of an architecture's row."""
    abilities = (family.native, family.lora, family.tensor_parallel, family.experts)
    return (family.name, family.layout or "no", *("yes" if able else "no" for able in abilities))


def summary(known: Sequence[Family]) -> str:
    """Return a sentence that counts the architectures."""
    trained = [family for family in known if family.layout]
    packed = sum(family.layout == "packed" for family in trained)
    return (
        f"{len(trained)} of {len(known)} architectures of transformers {tried_with()} can be trained, "
        f"{packed} of them with packed sequences; the native engine samples from "
        f"{sum(family.native for family in known)}"
    )
