"""The lengths of a benchmark's prompts and responses."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tandem.errors import ConfigError
from tandem.observability.reading import Run

FORMS = "N, uniform:LOW:HIGH, lognormal:MEAN:P95 or run:FOLDER"
_P95 = NormalDist().inv_cdf(0.95)


def lengths(option: str, spec: str, count: int, most: int) -> NDArray[np.int64]:
    """Return the lengths of `count` sequences, shortest first.

    The lengths are quantiles of a distribution, so that all batches of one size have the same lengths.

    Args:
        option: the option that the user gave, for messages.
        spec: a distribution in one of the formats of `FORMS`. For a recorded run, the lengths are the
            response lengths of the last step with samples.
        count: number of sequences.
        most: the largest allowed length. Larger lengths are reduced to this length.

    Raises:
        ConfigError: the spec cannot be parsed, or the lengths are below one or all above `most`.
        DataError: the run does not exist or has no samples.
    """
    kind, _, rest = spec.partition(":")
    places = (np.arange(count) + 0.5) / count
    if kind == "run":
        found = np.quantile([row["response_tokens"] for row in Run(rest).samples(None)], places)
    else:
        try:
            numbers = [float(word) for word in (rest.split(":") if rest else [kind])]
            found = _quantiles(kind if rest else "fixed", numbers, places)
        except ValueError as error:
            raise ConfigError("this option cannot be read", field=option, got=spec, expected=FORMS) from error
    if not np.isfinite(found).all() or found.min() < 0.5 or found.min() > most:
        raise ConfigError(
            "lengths out of range",
            field=option,
            got=spec,
            expected=f"tokens from 1 to {most}, the longest length that the config allows",
            remedy="give other lengths, or raise data.max_prompt_length or data.max_response_length",
        )
    whole: NDArray[np.int64] = np.clip(np.rint(found), 1, most).astype(np.int64)
    return whole


def _quantiles(kind: str, numbers: list[float], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles of a distribution at the given probabilities.

    Raises:
        ValueError: the distribution is unknown, or its parameters are impossible.
    """
    match kind, numbers:
        case "fixed", [length]:
            return np.full(len(places), length)
        case "uniform", [low, high] if low <= high:
            return low + (high - low) * places
        case "lognormal", [mean, p95] if mean < p95:
            # log p95 = log mean - s²/2 + z s; take the smaller root, the other one has a heavier tail
            root = _P95**2 - 2 * math.log(p95 / mean)
            sigma = _P95 - math.sqrt(root)
            normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
            return np.exp([normal.inv_cdf(place) for place in places])
    raise ValueError(kind)
