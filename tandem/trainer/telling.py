"""What a run tells its user when it begins and when it has ended."""

from __future__ import annotations

from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tandem.config.model import stored_config
from tandem.observability.reading import SHOWN, Run
from tandem.observability.sinks.console import duration


def beginning(model: str, rows: int, what: str, steps: int, folder: Path, checkpoint: Path | None) -> str:
    """The sentence with which a run begins.

    Args:
        model: its folder.
        rows: of the training data.
        what: a step takes, in words.
        steps: of the whole run.
        checkpoint: where it goes on from, if anywhere.
    """
    kind = stored_config(model).get("model_type", "unknown type")
    numbers = parameters(Path(model))
    size = "" if numbers is None else f", {short(numbers)} parameters"
    there = f"goes on from {checkpoint.name}" if checkpoint else "begins anew"
    return f"{model} ({kind}{size}); {rows:,} rows; {steps:,} steps of {what}; {there} in {folder}"


def parameters(model: Path) -> int | None:
    """The numbers in the weights of a model folder, read from their headers; None where they are in another
    format, or damaged, which is told as they are loaded."""
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError:
            return None
    return total or None


def short(number: float) -> str:
    """A count in three figures: 1.06 M, 7.62 B."""
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def ending(folder: Path, *, steps_taken: int) -> str:
    """What a run came to: its measures from first to last, where the model is, and what may follow."""
    run = Run(folder)
    newest = max(run.checkpoints.values(), default=None)
    if not steps_taken and run.state == "finished":
        more = (
            "trainer.total_training_steps=… takes it further; another trainer.default_local_dir begins anew"
        )
        told = [f"{folder} has taken its {run.steps} steps already: {more}"]
    else:
        told = [f"{run.steps} steps in {duration(run.seconds)}"]
    for name in SHOWN:
        if curve := run.curve(name):
            least_or_most = min if name.endswith("loss") else max
            step, best = least_or_most(curve, key=lambda point: point[1])
            ends = f"first {curve[0][1]:.3f}, last {curve[-1][1]:.3f}"
            told.append(f"{name}: {ends}, best {best:.3f} at step {step}")
    if newest is not None:
        told += [
            f"model: {newest}",
            f"next:  tandem samples {folder} --worst",
            f"       tandem export {folder} DIR",
        ]
    return "\n".join(told)
