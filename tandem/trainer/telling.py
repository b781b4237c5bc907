"""The messages of a run to its user when it starts and when it ends."""

from __future__ import annotations

from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tandem.config.changed_models import given_name, stored_config
from tandem.observability.reading import SHOWN, Run
from tandem.observability.sinks.console import duration


def beginning(model: str, rows: int, what: str, steps: int, folder: Path, checkpoint: Path | None) -> str:
    """Return the message for the start of a run.

    Args:
        model: The folder of the model.
        rows: The number of rows in the training data.
        what: A description of the data of one step.
        steps: The number of steps of the whole run.
        folder: The run folder.
        checkpoint: The checkpoint that the run resumes from; None for a new run.
    """
    kind = stored_config(model).get("model_type", "unknown type")
    numbers = parameters(Path(model))
    size = "" if numbers is None else f", {short(numbers)} parameters"
    there = f"resumes from {checkpoint.name}" if checkpoint else "new run"
    return (
        f"{given_name(model)} ({kind}{size}); {rows:,} rows; {steps:,} steps of {what}; {there} in {folder}"
    )


def parameters(model: Path) -> int | None:
    """Return the number of parameters in a model folder, read from the headers of its weight files.

    Return None if the weights have another format or are damaged; loading them reports this.
    """
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError:
            return None
    return total or None


def short(number: float) -> str:
    """Format a count with three significant figures: 1.06 M, 7.62 B."""
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def ending(folder: Path, *, steps_taken: int) -> str:
    """Return the final message of a run: its metrics, the model's folder and commands for the next steps."""
    run = Run(folder)
    newest = max(run.checkpoints.values(), default=None)
    if not steps_taken and run.state == "finished":
        more = (
            "set trainer.total_training_steps=… to train further, "
            "or set another trainer.default_local_dir to start a new run"
        )
        lines = [f"{folder} has already taken all {run.steps} steps: {more}"]
    else:
        lines = [f"{run.steps} {'step' if run.steps == 1 else 'steps'} in {duration(run.seconds)}"]
    for name in SHOWN:
        if curve := run.curve(name):
            least_or_most = min if name.endswith("loss") else max
            step, best = least_or_most(curve, key=lambda point: point[1])
            ends = f"first {curve[0][1]:.3f}, last {curve[-1][1]:.3f}"
            lines.append(f"{name}: {ends}, best {best:.3f} at step {step}")
    if newest is not None:
        further = [f"tandem export {folder} DIR"]
        if not run.config or run.sample_steps():  # supervised runs write no samples
            further.insert(0, f"tandem samples {folder} --worst")
        lines += [f"model: {newest}", f"next:  {further[0]}", *(f"       {line}" for line in further[1:])]
    return "\n".join(lines)
