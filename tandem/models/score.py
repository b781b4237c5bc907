"""The reward model: packed token ids in, a score of each sequence, or of some of its tokens, out.

Shapes: N input tokens, T entries of the micro-batch's token column.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.packing import PackedInputs
from tandem.models.policy import PackedModel, at_places
from tandem.models.value import one_number


class ScoreModel(PackedModel):
    """A language model's decoder under the trained head of a sequence classifier with one label, or of a
    token classifier.

    Args:
        model: what `load_scorer` gives.
    """

    kind, outputs, whole_sequences = "score", frozenset({"scores"}), True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def output_layer(self) -> nn.Linear:
        """The classifier's head."""
        score: nn.Linear = self.model.score
        return score

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """ "scores", (T) in fp32 (fp64 for an fp64 model): at the last token of each sequence, or at those
        that are judged, the head's output there, of two labels the probability of the second; zero elsewhere.

        Raises:
            EngineError: an output that a score model does not have.
        """
        self.check_outputs(outputs)
        return {"scores": at_places(one_number(self, inputs), inputs)}
