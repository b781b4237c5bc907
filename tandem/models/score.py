"""The reward model: packed token ids in, a score of each sequence or of some of its tokens out.

Shapes: N input tokens, T entries of the micro-batch's token column.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.packing import PackedInputs
from tandem.models.policy import PackedModel, at_positions
from tandem.models.value import head_outputs


class ScoreModel(PackedModel):
    """A language model's decoder with the trained head of a sequence classifier or token classifier.

    A sequence classifier has one label.

    Args:
        model: the model from `load_scorer`.
    """

    kind, outputs, whole_sequences = "score", frozenset({"scores"}), True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def output_layer(self) -> nn.Linear:
        """The head of the classifier."""
        score: nn.Linear = self.model.score
        return score

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """Return {"scores": (T)} in fp32 (fp64 for an fp64 model).

        The score is the head's output at the last token of each sequence, or at the tokens to be scored. With
        two labels it is the probability of the second label. Entries are zero elsewhere.

        Raises:
            EngineError: If a score model does not have an output.
        """
        self.check_outputs(outputs)
        return {"scores": at_positions(head_outputs(self, inputs), inputs)}
