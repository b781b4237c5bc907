"""`tandem export CHECKPOINT OUT`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.signals import import_module
from tandem.cli.typed import UsageError, run_typed
from tandem.observability.terminal import say

DTYPES = ("float32", "bfloat16", "float16")


def export(arguments: list[str]) -> int:
    return run_typed("export", _export, arguments)


def _export(
    checkpoint: Annotated[Path, typer.Argument(help="RUN/checkpoints/step_NNNNNN, or RUN for its newest")],
    out: Annotated[Path, typer.Argument(help="the Hugging Face folder to write")],
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES))] = "float32",
    max_shard_mb: Annotated[
        int, typer.Option(min=1, help="size of a weights file at most, MB (10^6 bytes); memory it takes")
    ] = 5000,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="the adapters alone (LoRA), as a folder that peft loads")
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="of RUN, the best by trainer.keep_best")] = False,
) -> None:
    """Writes a checkpoint's policy or trained reward model as a folder that transformers loads."""
    if dtype not in DTYPES:
        raise UsageError(
            "unknown type of weights",
            field="--dtype",
            got=dtype,
            expected=f"one of {', '.join(DTYPES)}",
            remedy="tandem export --help",
        )
    torch = import_module("torch")
    export_checkpoint = import_module("tandem.offline.export").export_checkpoint
    wrote = export_checkpoint(
        checkpoint,
        out,
        dtype=getattr(torch, dtype),
        best=best,
        adapter=adapter,
        max_shard_bytes=max_shard_mb * 10**6,
    )
    say(f"wrote {wrote}")
