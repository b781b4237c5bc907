"""Advantages over whole batches, in the precision of their columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.workers.batch import BatchWorker, group_ids


def test_groups_are_numbered_by_first_appearance() -> None:
    assert group_ids(np.array(["b", "b", "a", "b", "c"], dtype=object)).tolist() == [0, 0, 1, 0, 2]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_one_column_of_fp64_makes_the_rest_fp64(tmp_path: Path, estimator: str) -> None:
    """And the same numbers as in fp32, to its precision; GAE against its recursion."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 2, 3, 5])
    count = int(lengths.sum())
    mask = Ragged.from_lengths(torch.ones(count, dtype=torch.bool), lengths)
    scores = mask.with_values(torch.rand(count, generator=generator))
    logs = mask.with_values(-torch.rand(count, generator=generator))
    refs = mask.with_values(-torch.rand(count, generator=generator))
    values = mask.with_values(torch.rand(count, generator=generator, dtype=torch.float64))
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, use_kl_in_reward=True)
    worker = BatchWorker(config, RunFolder(tmp_path / "run"))
    columns = {
        "response_mask": mask,
        "token_level_scores": scores,
        "old_log_probs": logs,
        "ref_log_probs": refs,
    }
    uids = {"uid": ["a", "a", "b", "b"]}
    wide = worker.compute_advantages(DataProto(columns | {"values": values}, uids), 0.5)
    narrow = worker.compute_advantages(
        DataProto(columns | {"values": values.with_values(values.values.float())}, uids), 0.5
    )
    for name in ("token_level_rewards", "advantages", "returns"):
        assert wide.ragged(name).values.dtype == torch.float64
        assert narrow.ragged(name).values.dtype == torch.float32
        assert torch.allclose(wide.ragged(name).values.float(), narrow.ragged(name).values, atol=1e-4)
    rewards_T = scores.values.double() - 0.5 * (logs.values - refs.values).double()
    assert torch.allclose(wide.ragged("token_level_rewards").values, rewards_T, atol=1e-7)
    if estimator == "gae":
        raw = []
        for rewards, value in zip(wide.ragged("token_level_rewards"), values, strict=True):
            gained, row = 0.0, []
            for t in reversed(range(len(rewards))):
                after = float(value[t + 1]) if t + 1 < len(rewards) else 0.0
                gained = float(rewards[t]) + 0.9 * after - float(value[t]) + 0.9 * 0.8 * gained
                row.append(gained)
            raw += row[::-1]
        expected = torch.tensor(raw, dtype=torch.float64) + values.values
        assert torch.allclose(wide.ragged("returns").values, expected, atol=1e-12)
