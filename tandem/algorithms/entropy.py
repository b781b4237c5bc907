"""A controller that adjusts the entropy coefficient to keep the policy's entropy at a target."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field


@dataclass
class AdaptiveEntropyController:
    """A controller that raises or lowers the entropy coefficient after each step.

        c <- c + delta   if the entropy is below the target
        c <- c - delta   if the entropy is above the target
        value = c if entropy <= target else 0

    c stays within [minimum, maximum]. Before the first update, the value is the initial coefficient.

    When to use: if the entropy collapses early, and a constant coefficient is either too weak to prevent this
        or so strong that the entropy explodes.
    Watch: `actor/entropy` should stay near the target; `actor/entropy_coeff` should not stay at its maximum
        for long, because that means that the maximum is too low.
    Cost: nothing.
    Source: He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312, section 3.2.5.

    Args:
        coefficient: the initial c.
        target: target entropy, nats per token.
        delta: the amount that one update adds or subtracts.
        minimum: lower bound of c.
        maximum: upper bound of c.
    """

    coefficient: float
    _: KW_ONLY
    target: float
    delta: float
    minimum: float
    maximum: float
    _active: bool = field(default=True, init=False)

    @property
    def value(self) -> float:
        """The weight of the entropy bonus in the next update."""
        return self.coefficient if self._active else 0.0

    def update(self, entropy: float) -> None:
        """Adjust the coefficient after a step whose mean entropy, in nats per token, was `entropy`."""
        gap = self.target - entropy
        moved = self.coefficient + self.delta * ((gap > 0) - (gap < 0))
        self.coefficient = min(max(moved, self.minimum), self.maximum)
        self._active = gap >= 0

    def state_dict(self) -> dict[str, float | bool]:
        return {"coefficient": self.coefficient, "active": self._active}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        """Restore a saved coefficient."""
        self.coefficient, self._active = float(state["coefficient"]), bool(state["active"])
