"""Policy losses that treat some tokens apart, chosen once over a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from tandem.algorithms.registry import SELECTIONS, Function, Option, Spec, declared


class SelectionSpec(Spec):
    """A choice of tokens over a whole batch, before the updates on it."""

    kind = "choice of tokens"
    known_columns = MappingProxyType(
        {
            "old_log_probs": "(N) fp32, nats, of the policy before this batch's updates",
            "advantages": "(N) fp32",
            "response_mask": "(N) bool, tokens that the policy wrote",
            "offsets": "(B+1) int64, where each sequence starts",
        }
    )
    result = "(N) bool"

    def __call__(self, columns: Mapping[str, Tensor], options: Mapping[str, Option]) -> Tensor:
        """Calls the function with the columns it declares, and those of the options that are its own.

        Raises:
            ConfigError: it returned something else than a bool per token.
        """
        chosen = self._call(columns, {name: options[name] for name in self.options if name in options})
        mask = columns["response_mask"]
        if not (isinstance(chosen, Tensor) and chosen.shape == mask.shape and chosen.dtype == mask.dtype):
            raise self._wrong_result(chosen, f"bools of shape {tuple(mask.shape)}")
        return chosen


def selects_tokens(choice: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """A decorator of a policy loss that treats some tokens apart, such as the largest of all. `choice` says
    which, once for a whole batch, so that no division into micro-batches or ranks changes the loss:

        @register_policy_loss("mine")
        @selects_tokens(choice)
        def mine(log_probs, advantages, selected_tokens, *, weight=1.0): ...

    Args:
        choice: returns (N) bool; its signature declares columns and options as that of a loss does.

    Raises:
        ConfigError: a signature that is no declaration.
    """

    def decorate(fn: Function) -> Function:
        SELECTIONS[fn] = declared(SelectionSpec, choice.__name__, choice)
        return fn

    return decorate
