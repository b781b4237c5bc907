"""The section `algorithm.rollout_correction`: importance weights and rejection of samples.

Both correct for the difference between the rollout engine's probabilities and the training engine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tandem.config import tables
from tandem.config.needs import Check, own_code
from tandem.config.section import Need, OneOf, Section, When, beside, key
from tandem.errors import ConfigError

AT = "algorithm.rollout_correction"


def _as_text(value: Any) -> Any:
    """Convert a bound that is written as a number to text."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(float(value)) if is_number else value


def _as_modes(value: Any) -> Any:
    """Convert names separated by commas, or a list, to a tuple without duplicates.

    null is the empty tuple.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)) and all(isinstance(mode, str) for mode in value):
        return tuple(dict.fromkeys(value))
    return () if value is None else value


Threshold = Annotated[str, BeforeValidator(_as_text)]
Mode = Annotated[str, OneOf(tables.REJECTIONS, own_code=True)]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a weight or a statistic.

    Attributes:
        lower: the lower bound; None: no lower bound.
        upper: the upper bound.
    """

    lower: float | None
    upper: float


_WEIGHS = When(lambda own: own.rollout_is is not None, "if {rollout_is} is set")


def _readable(bounds: str) -> Need:
    """Return the rule that the property `bounds` can be parsed."""

    def check(own: Any, name: str) -> Iterator[ConfigError]:
        try:
            getattr(own, bounds)
        except ConfigError as error:
            yield error

    return check


_NORMALISED = Check(
    lambda own, normalised: normalised and own.bypass_mode,
    "the mean over the batch needs a forward pass before the update, which bypass_mode skips",
    remedy="set it to false, or set bypass_mode=false",
)


class RolloutCorrectionConfig(Section):
    """Importance weights, rejection, and the source of the old log-probs.

    Attributes:
        rollout_is: Importance weights: a name, or your own function as file.py:function. null: none.
        rollout_is_threshold: Bounds of the weights. One number: larger weights are reduced to this number.
            Two numbers, written as lower_upper with decimal points, such as 0.5_5.0: weights outside of this
            range become 0.
        rollout_is_batch_normalize: Divide the weights by their mean over the batch.
        rollout_rs: Rejection modes, separated by commas, or your own function as file.py:function. null:
            none.
        rollout_rs_threshold: Bounds for rejection: one bound for all modes, or one bound per mode, separated
            by commas. A bound is an upper limit. For the k1 modes, a bound is lower_upper, the limits of the
            ratio; a single number u means 1/u_u.
        bypass_mode: Use the rollout's log-probs as the old log-probs instead of recomputing them.
        loss_type: Policy loss, with bypass_mode=true. Only reinforce uses importance weights.
    """

    rollout_is: Annotated[str | None, OneOf(tables.IMPORTANCE_WEIGHTS, own_code=True)] = key(
        None,
        when=When(lambda own: own.takes_weights, "if {bypass_mode}=false or {loss_type}=reinforce"),
        needs=own_code,
    )
    rollout_is_threshold: Threshold = key("2.0", when=_WEIGHS, needs=_readable("weight_bounds"))
    rollout_is_batch_normalize: bool = key(False, when=_WEIGHS, needs=_NORMALISED)
    rollout_rs: Annotated[tuple[Mode, ...], BeforeValidator(_as_modes)] = key((), needs=own_code)
    rollout_rs_threshold: Threshold | None = key(
        None,
        when=When(lambda own: bool(own.rollout_rs), "if {rollout_rs} is set"),
        needs=_readable("rejection_bounds"),
    )
    bypass_mode: bool = False
    loss_type: Literal["ppo_clip", "reinforce"] = key("ppo_clip", when=beside("bypass_mode", True))

    @property
    def takes_weights(self) -> bool:
        """Whether importance weights are used.

        A loss with a clipped ratio to the sampling policy does not use importance weights, because this ratio
        already is an importance weight.
        """
        return not self.bypass_mode or self.loss_type == "reinforce"

    @property
    def applied_weight(self) -> str | None:
        """The importance weights that are used: a name or file.py:function; None if no weights are used."""
        return self.rollout_is if self.takes_weights else None

    @property
    def corrects(self) -> bool:
        """Whether importance weights or rejection are used."""
        return self.applied_weight is not None or bool(self.rollout_rs)

    @property
    def weight_bounds(self) -> Bounds:
        """The bounds of the importance weights.

        Raises:
            ConfigError: the numbers are not positive and ascending, or the upper bound is below 1.
        """
        field = f"{AT}.rollout_is_threshold"
        bounds = _bounds(field, self.rollout_is_threshold)
        if bounds.upper < 1:
            raise ConfigError(
                "this bound cuts the weight 1, which is the weight of samples that need no correction",
                field=field,
                got=bounds.upper,
                expected="an upper bound of at least 1",
                remedy=f"write two bounds with decimal points, {field}=0.5_5.0: YAML reads 0.5_5 as 0.55",
            )
        return bounds

    @property
    def rejection_bounds(self) -> tuple[Bounds, ...]:
        """The bounds of each mode's statistic.

        Raises:
            ConfigError: there is no bound, the number of bounds differs from the number of modes, the numbers
                are not positive and ascending, or a mode that has only an upper bound was given two bounds.
        """
        field, modes = f"{AT}.rollout_rs_threshold", self.rollout_rs
        texts = [part for part in (self.rollout_rs_threshold or "").split(",") if part.strip()]
        if len(texts) not in (1, len(modes)):
            raise ConfigError(
                "the number of bounds differs from the number of modes",
                field=field,
                got=self.rollout_rs_threshold,
                expected=f"one bound, or {len(modes)} separated by commas, for {','.join(modes)}",
                remedy=f"for example, set {field}=2.0",
            )
        texts = texts * len(modes) if len(texts) == 1 else texts
        return tuple(_rejection_bounds(field, *pair) for pair in zip(modes, texts, strict=True))


def _rejection_bounds(field: str, mode: str, text: str) -> Bounds:
    bounds = _bounds(field, text)
    if mode in tables.RATIO_REJECTIONS:
        lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
        if lower > bounds.upper:
            raise _wrong(field, text)
        return Bounds(math.log(lower), math.log(bounds.upper))
    if bounds.lower is not None and ":" not in mode:
        raise ConfigError(
            f"{mode} has only an upper bound", field=field, got=text, remedy=f"set {field}={bounds.upper}"
        )
    return bounds


def _bounds(field: str, text: str) -> Bounds:
    lower, underscore, upper = text.strip().rpartition("_")
    try:
        bounds = Bounds(float(lower) if underscore else None, float(upper))
    except ValueError:
        raise _wrong(field, text) from None
    numbers = [bounds.upper] if bounds.lower is None else [bounds.lower, bounds.upper]
    if not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
        raise _wrong(field, text)
    return bounds


def _wrong(field: str, text: str) -> ConfigError:
    return ConfigError(
        "these are not valid bounds",
        field=field,
        got=text,
        expected="a number above 0, or lower_upper with 0 < lower <= upper",
        remedy=f"for example, set {field}=2.0 or {field}=0.5_5.0",
    )
