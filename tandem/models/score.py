"""The reward model, which computes scores of packed sequences, or of some of their tokens.

Shapes: N input tokens, T entries of the micro-batch's token column.
"""

from __future__ import annotations

from torch import Tensor, nn

from tandem.models.packing import PackedInputs
from tandem.models.policy import PackedModel, at_positions
from tandem.models.value import head_outputs


class ScoreModel(PackedModel):
    """A language model's decoder with the trained head of a sequence classifier or token classifier.

    A sequence classifier must have one label, and a token classifier one or two labels.

    Args:
        model: the model from `load_scorer`.
    """

    kind, outputs, whole_sequences = "score", frozenset({"scores"}), True

    @property
    def output_layer(self) -> nn.Linear:
        """The head of the classifier."""
        score: nn.Linear = self.model.score
        return score

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """Return {"scores": (T)} in fp32 (fp64 for an fp64 model).

        A score is the head's output at the last token of each sequence, or at the tokens to be scored. With
        two labels, a score is the probability of the second label. Entries at all other tokens are zero.

        Raises:
            EngineError: If a score model does not have one of the outputs.
        """
        self.check_outputs(outputs)
        return {"scores": at_positions(head_outputs(self, inputs), inputs)}
