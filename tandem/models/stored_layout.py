"""The names and shapes of weights in the published folders of an architecture.

They may differ from the names and shapes in transformers. For example, transformers has one tensor for all
experts of a layer, and most folders have a separate tensor for each expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class StoredLayout:
    """A conversion of weights from the layout of transformers to the layout of published folders.

    Args:
        model: a transformers model of the architecture. Its weights may be on the meta device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._together: dict[str, set[str]] = {}  # weights from which the same stored tensor is built
        first: dict[str, str] = {}  # name of a stored tensor → the first weight from which it is built
        for name, value in model.state_dict().items():
            for target in revert_weight_conversion(model, {name: value}):
                other = first.setdefault(target, name)
                if other != name:
                    joined = self._together.get(other, {other}) | self._together.get(name, {name})
                    self._together |= dict.fromkeys(joined, joined)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> StoredLayout:
        """Return the layout of a causal language model with this config."""
        make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            return cls(make(copy.deepcopy(config), attn_implementation="eager"))

    def converted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a published folder, with their names.

        Only one weight is in memory at a time. If a stored tensor is built from several weights, those
        weights are copied until all of them have come.

        Args:
            weights: pairs of name in transformers and whole tensor. Each tensor is valid only until the next
                one is requested. The same holds for the result.
        """
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            group = self._together.get(name)
            if group is None:
                yield from revert_weight_conversion(self._model, {name: tensor}).items()
                continue
            waiting[name] = tensor.clone()
            if group <= waiting.keys():
                parts = {part: waiting.pop(part) for part in group}
                yield from revert_weight_conversion(self._model, parts).items()
