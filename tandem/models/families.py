"""What is known of each causal language model of transformers: whether Tandem trains it, and how.

The file families.json has one entry per architecture. `python -m docs.families` makes it: each architecture
is tried out with a small random copy in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.texts import parse_json

FILE = Path(__file__).with_name("families.json")


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of one architecture.

    Attributes:
        name: the `model_type`, and the settings of a variant in brackets.
        layout: "packed" or "rows": whether sequences are packed into one row in training, or each has a row
            of its own; "" if the architecture cannot be trained.
        error: the largest difference of a log-prob from transformers' own model, relative above 1.
        native: whether the native rollout engine samples from it, with log-probs equal to transformers'.
        lora: whether adapters can be trained on all linear layers.
        tensor_parallel: whether each layer can be split over ranks.
        experts: whether it is a mixture of experts.
        reason: why it cannot be trained, or why the native engine cannot sample from it; "" if it can.
    """

    name: str
    layout: str
    error: float
    native: bool
    lora: bool
    tensor_parallel: bool
    experts: bool
    reason: str


def families() -> list[Family]:
    """Return what is known of each architecture, in alphabetical order."""
    return [Family(**entry) for entry in parse_json(FILE.read_text(encoding="utf-8"))["families"]]


def tried_with() -> str:
    """Return the version of transformers with which the architectures were tried."""
    version: str = parse_json(FILE.read_text(encoding="utf-8"))["transformers"]
    return version
