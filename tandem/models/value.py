"""The value model, which computes the expected return before each token of packed sequences.

Shapes: N input tokens, K predicted tokens, T entries of the micro-batch's token column, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.lora import plain_name
from tandem.models.packing import PackedInputs
from tandem.models.policy import PackedModel, at_positions, decode
from tandem.models.tensor_group import local


class ValueModel(PackedModel):
    """A language model's decoder with a linear head that starts at zero.

    So the first values are 0 for any language model, and no weight of the head is random.

    Args:
        model: a causal language model, loaded with `attention=PACKED`; its language model head is dropped.
    """

    kind, outputs = "value", frozenset({"values"})
    starts_at_zero = frozenset({"value_head.weight", "value_head.bias"})

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.model = super().decoder
        parameter = next(model.parameters())
        hidden = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden, 1, bias=True, dtype=parameter.dtype, device=parameter.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def decoder(self) -> Any:
        """The whole language model without its head."""
        return self.model

    @property
    def output_layer(self) -> nn.Linear:
        """The value head."""
        return self.value_head

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """Return {"values": (T)} in fp32 (fp64 for an fp64 model).

        Entry t is predicted from the tokens before t. Entries are zero at tokens whose values are not needed.

        Raises:
            EngineError: If a value model does not have one of the outputs.
        """
        self.check_outputs(outputs)
        return {"values": at_positions(head_outputs(self, inputs), inputs)}

    def hf_name(self, name: str) -> str:
        """Return the name that a parameter has in the folder of a causal language model.

        The value head, which such folders do not contain, keeps its name.
        """
        head, _, rest = name.partition(".")
        return plain_name(f"{self.decoder_name}.{rest}" if head == "model" else name)


def head_outputs(module: PackedModel, inputs: PackedInputs) -> Tensor:
    """Return (K) the head's output at each needed position.

    If the head has two outputs, the result is the probability of the second. The precision is at least fp32,
    because bf16 would round the result to three digits.
    """
    head = module.output_layer
    hidden_KD = decode(module, inputs).index_select(0, inputs.sources)
    out_type = torch.promote_types(hidden_KD.dtype, torch.float32)
    bias_1 = None if head.bias is None else local(head.bias).to(out_type)
    out_KL = nn.functional.linear(hidden_KD.to(out_type), local(head.weight).to(out_type), bias_1)
    return out_KL.squeeze(-1) if out_KL.shape[-1] == 1 else out_KL.softmax(-1)[:, 1]
