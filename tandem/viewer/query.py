"""Parse the parameters of an address, and select samples by these parameters."""

from __future__ import annotations

from urllib.parse import parse_qs

import numpy as np

from tandem.errors import ConfigError
from tandem.viewer.index import SampleIndex

RANGES = ("step", "score", "length")  # columns with a histogram; samples can be selected by their range
SORTED = (*RANGES, "order")
_LONGEST_TEXT = 10_000


class Query:
    """The parameters of an address.

    Args:
        text: the query string, after the `?`.

    Raises:
        ConfigError: there are too many parameters.
    """

    def __init__(self, text: str) -> None:
        try:
            self._given = parse_qs(text, max_num_fields=100)
        except ValueError as error:
            raise ConfigError(str(error), field="the address") from error

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name, [default])[-1][:_LONGEST_TEXT]

    def several(self, name: str) -> list[str]:
        """Return all values of a parameter that may be given several times."""
        return self._given.get(name, [])

    def whole(self, name: str, default: int, most: int = 10**9) -> int:
        """Return a whole number from 0 to `most`.

        Raises:
            ConfigError: the value is not a whole number, or out of range.
        """
        text = self.text(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
            raise ConfigError(
                "must be a whole number in this range", field=name, got=text[:40], expected=f"0 … {most}"
            )
        return int(text)

    def span(self, name: str) -> tuple[float, float] | None:
        """Return the range of a parameter `LOW..HIGH`; None if the parameter is not given.

        LOW or HIGH may be missing. A single number is a range of one value.

        Raises:
            ConfigError: the value is not a range.
        """
        text = self.text(name)
        low, dots, high = text.partition("..")
        try:
            return (float(low or "-inf"), float((high or "inf") if dots else low)) if text else None
        except ValueError as error:
            raise ConfigError("must be a range", field=name, got=text[:40], expected="LOW..HIGH") from error


def selected(query: Query, index: SampleIndex) -> tuple[np.ndarray, dict[str, dict[str, list[float]]]]:
    """Select the samples that meet all conditions of an address.

    The conditions are: `text` in the prompt or the response, `kind` (train or val), `prompt` by its number,
    names in `source` and `finish`, and ranges of the columns `RANGES`.

    Returns:
        The row numbers of the selected samples, in the order of the files. And a dict from each column of
        `RANGES` to a histogram (`edges` and `counts`) of the samples that meet all conditions except the
        condition on this column.
    """
    table = index.table
    masks = {"all": np.ones(len(table["step"]), bool)}
    for name in RANGES:
        if (span := query.span(name)) is not None:
            masks[name] = (table[name] >= span[0]) & (table[name] <= span[1])
    for name in ("source", "finish"):
        if wanted := query.several(name):
            codes = [number for number, text in enumerate(index.codes[name].texts) if text in wanted]
            masks[name] = np.isin(table[name], codes)
    if text := query.text("text"):
        masks["text"] = index.containing(text)
    if kind := query.text("kind"):
        masks["kind"] = table["val"] == (kind == "val")
    if query.text("prompt"):
        masks["prompt"] = table["prompt"] == query.whole("prompt", 0, 2**31)
    histograms = {}
    for column in RANGES:
        others = np.logical_and.reduce([mask for name, mask in masks.items() if name != column])
        edges, places = index.bins(column)
        counts = np.bincount(places[others], minlength=len(edges))[: len(edges) - 1].tolist()
        histograms[column] = {"edges": edges, "counts": counts}
    return np.logical_and.reduce([*masks.values()]).nonzero()[0], histograms


def ordered(rows: np.ndarray, index: SampleIndex, by: str, *, descending: bool) -> np.ndarray:
    """Sort rows by a column of `SORTED`.

    Rows with equal values keep the order of the files, or the reverse order if `descending`. For the column
    "order", all rows count as equal.

    Raises:
        ConfigError: the rows cannot be sorted by this column.
    """
    if by not in SORTED:
        raise ConfigError(
            "samples cannot be sorted by this", field="sort", got=by[:40], expected=", ".join(SORTED)
        )
    backwards = rows[::-1] if descending else rows
    if by in ("order", "step"):
        return backwards
    values = index.table[by][backwards]
    return backwards[np.argsort(-values if descending else values, kind="stable")]
