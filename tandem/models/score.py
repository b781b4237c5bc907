"""The reward model: packed token ids in, a score of each sequence, or of some of its tokens, out.

Shapes: N input tokens, T entries of the micro-batch's token column.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.kernels import Kernels
from tandem.models.lora import plain_name
from tandem.models.packing import PackedInputs
from tandem.models.policy import at_places, check_outputs
from tandem.models.value import one_number

SCORE_OUTPUTS = frozenset({"scores"})


class ScoreModel(nn.Module):
    """A language model's decoder under the trained head of a sequence classifier with one label, or of a
    token classifier.

    Args:
        model: what `load_scorer` gives.
    """

    whole_sequences = True
    kernels = Kernels()
    starts_at_zero: frozenset[str] = frozenset()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: Any = model

    @property
    def decoder(self) -> Any:
        """The whole language model below the head."""
        return self.model.model

    @property
    def head(self) -> nn.Linear:
        """The layer that judges a hidden state."""
        score: nn.Linear = self.model.score
        return score

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """ "scores", (T) in fp32 (fp64 for an fp64 model): at the last token of each sequence, or at those
        that are judged, the head's output there, of two labels the probability of the second; zero elsewhere.

        Raises:
            EngineError: an output that a score model does not have.
        """
        check_outputs(outputs, SCORE_OUTPUTS, "score")
        return {"scores": at_places(one_number(self.head, self.decoder, inputs), inputs)}

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a parameter of this module."""
        return plain_name(name.removeprefix("model."))
