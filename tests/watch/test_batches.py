import numpy as np
import pytest
import torch

from tandem.config.rollout import RolloutConfig
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.watch.batches import CHECK, SpecialTokens, add_checks, certain
from tandem.watch.gap import SAMPLED


@pytest.mark.parametrize(
    ("sampling", "likely", "early"),
    [
        ({}, 0.92, 1),
        ({}, 0.9999, 0),
        ({"top_p": 0.9}, 0.92, 0),  # this token alone fills top_p
        ({"top_p": 0.9}, 0.88, 1),
        ({"top_p": 0.9, "top_k": 2}, 0.88, 1),
        ({"top_k": 1}, 0.4, 0),
        ({"min_p": 0.5}, 0.4, 0),
    ],
)
def test_a_first_token_without_a_log_prob_is_early_unless_nothing_else_could_be_drawn(
    sampling, likely, early
):
    tokens = Ragged.from_list([[1, 2, 3]], dtype=torch.int64)
    batch = DataProto(
        {
            "tokens": tokens,
            "response_mask": tokens.with_values(torch.tensor([False, True, True])),
            SAMPLED: tokens.with_values(torch.tensor([0.0, 0.0, -1.0])),
            "old_log_probs": tokens.with_values(torch.tensor([0.0, np.log(likely), -1.0])),
            "advantages": tokens.with_values(torch.zeros(3)),
            "scores": torch.zeros(1),
        },
        {"uid": ["0-0"], "sample": [0]},
    )
    metrics = Metrics()
    add_checks(metrics, batch, SpecialTokens(), certain(RolloutConfig(name="native", **sampling)))
    assert metrics.to_floats()[f"{CHECK}early_mask"] == early
