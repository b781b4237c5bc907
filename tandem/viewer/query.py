"""What an address asks for, and which samples it selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

import numpy as np

from tandem.errors import ConfigError
from tandem.viewer.index import SampleIndex

RANGES = ("step", "score", "length")
"""Columns that are selected by a range, and have a histogram."""
SORTED = (*RANGES, "order")
_LONGEST_TEXT = 10_000


class Query:
    """The parameters of an address.

    Args:
        text: what follows the `?`.

    Raises:
        ConfigError: there are too many.
    """

    def __init__(self, text: str) -> None:
        try:
            pairs = parse_qsl(text, max_num_fields=100)
        except ValueError as error:
            raise ConfigError(str(error), field="the address") from error
        self._given = dict(pairs)
        self._lists = {name: [value for key, value in pairs if key == name] for name in self._given}

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name, default)[:_LONGEST_TEXT]

    def several(self, name: str) -> list[str]:
        """All values of a parameter that may be given several times."""
        return self._lists.get(name, [])

    def whole(self, name: str, default: int, most: int) -> int:
        """A whole number from 0 to `most`."""
        text = self._given.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
            raise ConfigError(
                "not a whole number in its range", field=name, got=text[:40], expected=f"0 … {most}"
            )
        return int(text)

    def span(self, name: str) -> tuple[float, float] | None:
        """`LOW..HIGH`, either of which may be missing; or one number, which is both."""
        text = self._given.get(name, "")
        low, dots, high = text.partition("..")
        try:
            return (float(low or "-inf"), float((high or "inf") if dots else low)) if text else None
        except ValueError as error:
            raise ConfigError("not a range", field=name, got=text[:40], expected="LOW..HIGH") from error


@dataclass(frozen=True, slots=True)
class Selection:
    """Which samples are wanted.

    Attributes:
        ranges: least and greatest value by column.
        names: of `source` and `finish`, the values wanted; empty: all.
        text: in the prompt or the response.
        kind: "train", "val", or "" for both.
        prompt: the number of a prompt; None: all.
    """

    ranges: Mapping[str, tuple[float, float]]
    names: Mapping[str, list[str]]
    text: str
    kind: str
    prompt: int | None

    @classmethod
    def asked(cls, query: Query) -> Selection:
        spans = {name: query.span(name) for name in RANGES}
        return cls(
            ranges={name: span for name, span in spans.items() if span is not None},
            names={name: query.several(name) for name in ("source", "finish")},
            text=query.text("text"),
            kind=query.text("kind"),
            prompt=query.whole("prompt", 0, 2**31) if query.text("prompt") else None,
        )

    def masks(self, index: SampleIndex) -> Iterator[tuple[str, np.ndarray]]:
        """Each condition's name and which samples meet it."""
        table = index.table
        for name, (low, high) in self.ranges.items():
            yield name, (table[name] >= low) & (table[name] <= high)
        for name, wanted in self.names.items():
            if wanted:
                codes = [number for number, text in enumerate(index.codes[name].texts) if text in wanted]
                yield name, np.isin(table[name], codes)
        if self.text:
            yield "text", index.containing(self.text)
        if self.kind:
            yield "kind", table["val"] == (self.kind == "val")
        if self.prompt is not None:
            yield "prompt", table["prompt"] == self.prompt

    def matched(self, index: SampleIndex) -> tuple[np.ndarray, dict[str, list[int]]]:
        """The numbers of the samples that meet all conditions, in the order of the files, and for each column
        of `RANGES` the counts of its histogram over those that meet all but its own."""
        masks = dict(self.masks(index))
        everything = np.ones(len(index.table["step"]), bool)
        histograms = {}
        for column in RANGES:
            others = [mask for name, mask in masks.items() if name != column]
            edges, places = index.bins(column)
            chosen = places[np.logical_and.reduce(others)] if others else places
            histograms[column] = np.bincount(chosen, minlength=len(edges))[: len(edges) - 1].tolist()
        both = np.logical_and.reduce([everything, *masks.values()])
        return both.nonzero()[0], histograms


def ordered(rows: np.ndarray, index: SampleIndex, by: str, *, descending: bool) -> np.ndarray:
    """Rows by a column of `SORTED`; equal ones, and all by "order", as the files have them, or backwards."""
    if by not in SORTED:
        raise ConfigError("cannot be sorted by", field="sort", got=by[:40], expected=", ".join(SORTED))
    backwards = rows[::-1] if descending else rows
    if by in ("order", "step"):
        return backwards
    values = index.table[by][backwards]
    return backwards[np.argsort(-values if descending else values, kind="stable")]
