"""The command `tandem export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.signals import import_module
from tandem.cli.typed import UsageError, command
from tandem.observability.terminal import say

DTYPES = ("float32", "bfloat16", "float16")


@command
def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "float32",
    max_shard_mb: Annotated[int, typer.Option(min=1)] = 5000,
    adapter: bool = False,
    best: bool = False,
) -> None:
    """Export a checkpoint's policy or reward model as a Hugging Face model folder.

    Args:
        checkpoint: RUN/checkpoints/step_NNNNNN, or RUN for its newest checkpoint
        out: the Hugging Face folder to write
        dtype: float32, bfloat16 or float16
        max_shard_mb: largest size of a weights file, in MB (10^6 bytes); the export needs as much memory
        adapter: export only the adapters (LoRA), as a folder that peft loads
        best: export the best checkpoint of RUN, as chosen by trainer.keep_best
    """
    if dtype not in DTYPES:
        raise UsageError(
            "unknown data type of weights",
            field="--dtype",
            got=dtype,
            expected=f"one of {', '.join(DTYPES)}",
            remedy="tandem export --help",
        )
    wrote = import_module("tandem.offline.export").export_checkpoint(
        checkpoint,
        out,
        dtype=getattr(import_module("torch"), dtype),
        best=best,
        adapter=adapter,
        max_shard_bytes=max_shard_mb * 10**6,
    )
    say(f"wrote {wrote}")
