"""The measurements that the users' benchmark document publishes («Compare with Verl»); documents.json has
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.memory import shapes
from tandem.texts import parse_json

_SAME = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NOTES = (
    "The document's gen throughput is of a data-parallel rank of two GPUs: 512 responses × their mean length "
    "/ the generation time / 4. Its prev logprob throughput is of a GPU, its step throughput of all. Its "
    "training time is the same number in both tables of the 1.5B model. save_checkpoint lies outside the "
    "step, there and here."
)


@dataclass(frozen=True, slots=True)
class Published:
    """A column of figures.

    Attributes:
        system: which was measured.
        model: its published name.
        parameters: of the run, as the document names them.
        rows: its figures under the names of `tandem bench`; seconds and tokens.
        throughput: what it prints as rates, by its own names.
    """

    system: str
    model: str
    parameters: Mapping[str, str]
    rows: Mapping[str, float]
    throughput: Mapping[str, float]


_TABLES = parse_json(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["tables"]
DOCUMENTS = tuple(Published(**each) for each in _TABLES)


def published(stored: Mapping[str, Any]) -> tuple[Published, ...]:
    """The document's figures of a model with this config.json."""
    return tuple(
        each
        for each in DOCUMENTS
        if all(stored.get(key) == (shapes.published(each.model) or {})[key] for key in _SAME)
    )
