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
from tandem.models.policy import PackedModel, at_positions, decode
from tandem.models.tensor_group import local


class ValueModel(PackedModel):
    """A language model's decoder with a linear head that starts at zero.

    The first values are 0 for any language model, and nothing in the head is random.

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
        """The value head."""
        return self.value_head

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """Return {"values": (T)} in fp32 (fp64 for an fp64 model).

        Entry t is predicted from the tokens before t. Entries are zero at tokens that were not asked for.

        Raises:
            EngineError: If a value model does not have an output.
        """
        self.check_outputs(outputs)
        return {"values": at_positions(head_outputs(self, inputs), inputs)}

    def hf_name(self, name: str) -> str:
        """Return the name of a parameter in a folder that `load_policy` reads. The head has its own name."""
        return plain_name(name)


def head_outputs(module: PackedModel, inputs: PackedInputs) -> Tensor:
    """Return (K) the head's output at each position that was asked for.

    With two outputs it is the probability of the second. The precision is at least fp32, because bf16 would
    round the result to three digits.
    """
    head = module.output_layer
    hidden_KD = decode(module.decoder, inputs).index_select(0, inputs.sources)
    out_type = torch.promote_types(hidden_KD.dtype, torch.float32)
    bias_1 = None if head.bias is None else local(head.bias).to(out_type)
    out_KL = nn.functional.linear(hidden_KD.to(out_type), local(head.weight).to(out_type), bias_1)
    return out_KL.squeeze(-1) if out_KL.shape[-1] == 1 else out_KL.softmax(-1)[:, 1]
