"""The coefficient of the entropy bonus, moved so that the policy's entropy stays at a target."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field


@dataclass
class AdaptiveEntropyController:
    """An entropy coefficient that answers to the entropy:

        c <- c + delta   where the entropy is below the target
        c <- c - delta   where it is above
        value = c if entropy <= target else 0

    c stays within its bounds. Before the first update the value is the initial coefficient.

    When to use: where the entropy collapses early, and a constant coefficient is either too weak to hold it
        or so strong that it blows up.
    Watch: `actor/entropy` should stay near the target; `actor/entropy_coeff` at its upper bound for long
        means that the bound is too low.
    Cost: nothing.
    Source: He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312, section 3.2.5.

    Args:
        coefficient: the first c.
        target: nats per token.
        delta: what an update adds or takes off.
        minimum, maximum: the bounds of c.
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
        """Moves the coefficient after a step whose mean entropy, nats per token, was `entropy`."""
        gap = self.target - entropy
        moved = self.coefficient + self.delta * ((gap > 0) - (gap < 0))
        self.coefficient = min(max(moved, self.minimum), self.maximum)
        self._active = gap >= 0

    def state_dict(self) -> dict[str, float | bool]:
        return {"coefficient": self.coefficient, "active": self._active}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        """Goes on from a saved coefficient."""
        self.coefficient, self._active = float(state["coefficient"]), bool(state["active"])
