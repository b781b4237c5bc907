"""The lengths that a benchmark's prompts and responses have."""

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
    """The lengths of so many sequences, shortest first: the quantiles of a distribution, so that every batch
    of a size has the same ones.

    Args:
        option: where the user gave it, for messages.
        spec: one of `FORMS`; of a recorded run the response lengths of its last step with samples.
        count: how many.
        most: the greatest; longer ones are cut to it, as responses are.

    Raises:
        ConfigError: a spec that cannot be read, or lengths below one or all above the greatest.
        DataError: no such run, or one without samples.
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
            raise ConfigError("cannot be read", field=option, got=spec, expected=FORMS) from error
    if not np.isfinite(found).all() or found.min() < 0.5 or found.min() > most:
        raise ConfigError(
            "lengths out of range",
            field=option,
            got=spec,
            expected=f"tokens from 1 to {most}, the greatest length of the config",
            remedy="give other lengths, or raise data.max_prompt_length or data.max_response_length",
        )
    whole: NDArray[np.int64] = np.clip(np.rint(found), 1, most).astype(np.int64)
    return whole


def _quantiles(kind: str, numbers: list[float], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Raises:
        ValueError: no such distribution.
    """
    match kind, numbers:
        case "fixed", [length]:
            return np.full(len(places), length)
        case "uniform", [low, high] if low <= high:
            return low + (high - low) * places
        case "lognormal", [mean, p95] if mean < p95:
            # log p95 = log mean - s²/2 + z s; the smaller root, as the other is of a wilder tail
            root = _P95**2 - 2 * math.log(p95 / mean)
            sigma = _P95 - math.sqrt(root)
            normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
            return np.exp([normal.inv_cdf(place) for place in places])
    raise ValueError(kind)
