"""`tandem export CHECKPOINT OUT`"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer


def export(arguments: list[str]) -> int:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_export)
    app(args=arguments, prog_name="tandem export", standalone_mode=False)
    return 0


def _export(
    checkpoint: Annotated[Path, typer.Argument(help="RUN/checkpoints/step_NNNNNN, or RUN for its newest")],
    out: Annotated[Path, typer.Argument(help="the Hugging Face folder to write")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Writes a checkpoint's policy as a folder that transformers loads."""
    torch = import_module("torch")
    export_checkpoint = import_module("tandem.trainer.export").export_checkpoint
    print(f"wrote {export_checkpoint(checkpoint, out, dtype=getattr(torch, dtype))}")
