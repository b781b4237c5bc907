"""Published measurements from the benchmark document «Compare with Verl», stored in documents.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.memory import shapes
from tandem.texts import parse_json

_SAME = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NOTES = (
    "The document gives gen throughput per data-parallel rank of two GPUs: 512 responses × their mean length "
    "/ the generation time / 4. It gives prev logprob throughput per GPU, and step throughput for all GPUs. "
    "Both of its tables of the 1.5B model have the same training time. save_checkpoint is not part of the "
    "step, neither there nor here."
)


@dataclass(frozen=True, slots=True)
class Published:
    """A column of the document's figures.

    Attributes:
        system: the system that was measured.
        model: the model's published name.
        parameters: parameters of the run, with the document's names.
        rows: the figures of the column, in seconds and tokens, with the names of `tandem bench`.
        throughput: the rates of the column, with the document's names.
    """

    system: str
    model: str
    parameters: Mapping[str, str]
    rows: Mapping[str, float]
    throughput: Mapping[str, float]


_TABLES = parse_json(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["tables"]
DOCUMENTS = tuple(Published(**each) for each in _TABLES)


def published(stored: Mapping[str, Any]) -> tuple[Published, ...]:
    """Return the document's columns for a model with the given config.json."""
    return tuple(
        each
        for each in DOCUMENTS
        if all(stored.get(key) == (shapes.published(each.model) or {})[key] for key in _SAME)
    )
