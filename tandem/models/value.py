"""The value model: packed token ids in, the expected return before each token out.

Shapes: N input tokens, K predicted tokens, T entries of the micro-batch's token column, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.lora import plain_name
from tandem.models.packing import PackedInputs
from tandem.models.policy import PackedModel, at_places, decode
from tandem.models.tensor_group import local


class ValueModel(PackedModel):
    """A language model's decoder under a linear head that starts at zero: the first values are 0,
    whatever the language model was, and nothing in it is random.

    Args:
        model: a causal language model, loaded with `attention=PACKED`; its own head is dropped.
    """

    kind, outputs = "value", frozenset({"values"})
    starts_at_zero = frozenset({"value_head.weight", "value_head.bias"})

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        causal_lm: Any = model
        self.model = causal_lm.get_decoder()
        parameter = next(model.parameters())
        hidden = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden, 1, bias=True, dtype=parameter.dtype, device=parameter.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def decoder(self) -> Any:
        """The whole language model below the head."""
        return self.model

    @property
    def output_layer(self) -> nn.Linear:
        """The head."""
        return self.value_head

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """ "values", (T) in fp32 (fp64 for an fp64 model): entry t is predicted from the tokens
        before t; zero at tokens that were not asked for.

        Raises:
            EngineError: an output that a value model does not have.
        """
        self.check_outputs(outputs)
        return {"values": at_places(one_number(self, inputs), inputs)}

    def hf_name(self, name: str) -> str:
        """The name of a parameter in a folder that `load_policy` reads; the head has one of its own."""
        return plain_name(name)


def one_number(module: PackedModel, inputs: PackedInputs) -> Tensor:
    """(K): the head's single output over the last hidden state at each position asked for; of two outputs the
    second's probability. In the output's precision, at least fp32: bf16 would round it to three digits."""
    head = module.output_layer
    hidden_KD = decode(module.decoder, inputs).index_select(0, inputs.sources)
    out_type = torch.promote_types(hidden_KD.dtype, torch.float32)
    bias_1 = None if head.bias is None else local(head.bias).to(out_type)
    out_KL = nn.functional.linear(hidden_KD.to(out_type), local(head.weight).to(out_type), bias_1)
    return out_KL.squeeze(-1) if out_KL.shape[-1] == 1 else out_KL.softmax(-1)[:, 1]
