"""The rule by which a causal language model of transformers computes logits from its output layer.

The keys of the config tell the rule. The trial of an architecture (see `packed_check`) compares the resulting
log-probs with the model's own, so a rule that is missing here is found before training.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ModelError

_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # multiply the logits
_DIVISOR = "logits_scaling"  # divides the logits, or the hidden states of a head without bias
_MULTIPLIES_INSTEAD = ("hyperclovax",)  # model types whose `logits_scaling` multiplies
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_COLUMNS = 8  # kernels need rows whose size is a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The rule logits = softcap tanh(scale z / softcap), with z = hidden weightᵀ + bias.

    Attributes:
        scale: the factor of z; > 0.
        softcap: the largest absolute value of a logit; 0: logits = scale z.
    """

    scale: float = 1.0
    softcap: float = 0.0

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Return the rule of a causal language model.

        Only keys that the config's class declares count, because transformers ignores all others.

        Raises:
            ModelError: If a number is not positive.
        """
        text = config.get_text_config()
        names = [name for name in (*_FACTORS, _DIVISOR, *_CAPS) if hasattr(type(text), name)]
        found = {name: value for name in names if (value := getattr(text, name)) is not None}
        for name, value in found.items():
            if value <= 0:
                raise ModelError(
                    "this number must be positive",
                    field="model.path",
                    got=f"{name}={value} in config.json",
                    remedy="put the config.json that belongs to these weights into the folder",
                )
        scaling = found.get(_DIVISOR, 1.0)
        multiplies = text.model_type.startswith(_MULTIPLIES_INSTEAD)
        factors = [found.get(name, 1.0) for name in _FACTORS]
        caps = [found[name] for name in _CAPS if name in found]
        return cls(prod(factors) * (scaling if multiplies else 1 / scaling), min(caps, default=0.0))

    def at(self, temperature: float) -> dict[str, float]:
        """Return the arguments `temperature` and `softcap` of a head, for logits divided by `temperature`."""
        return {"temperature": temperature / self.scale, "softcap": self.softcap / temperature}


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the weight (V, D) of an output layer. If the layer has a bias (V), the result has more columns.

    The first of these columns is the bias, the others are zero. For hidden states from `for_bias`, a head
    then adds the bias to its logits. Gradients reach weight and bias.
    """
    if bias is None:
        return weight
    return torch.cat([weight, bias.unsqueeze(1), torch.zeros_like(weight[:, 1:_COLUMNS])], 1)


def for_bias(hidden_MD: Tensor, weight: Tensor) -> Tensor:
    """Return the hidden states, followed by a one and zeros if `weight` has columns for a bias."""
    more = weight.shape[1] - hidden_MD.shape[1]
    if more == 0:
        return hidden_MD
    one_MC = hidden_MD.new_zeros(len(hidden_MD), more)
    one_MC[:, 0] = 1
    return torch.cat([hidden_MD, one_MC], 1)
