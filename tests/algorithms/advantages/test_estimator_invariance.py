"""Properties that every registered estimator must have, whatever its equation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.registry import ADVANTAGES, Advantages
from tandem.algorithms.registry import advantage_estimator as find
from tests.algorithms.batches import SEEDS, ragged_columns, rows

LENGTHS = st.lists(st.integers(0, 60) | st.sampled_from([1, 400]), min_size=2, max_size=8)


def usable(lengths, seed, dtype=torch.float64, holes=0.2):
    """Return columns that every estimator accepts: rewards are success rates, and probabilities are valid."""
    columns = ragged_columns(lengths, seed, dtype, holes)
    rewards = columns["token_level_rewards"].abs().clamp(max=1)
    inside = {
        "sum_pi_squared": columns["old_log_probs"].exp() ** 2 + 0.1,
        "old_log_probs": columns["old_log_probs"],
        "ref_log_probs": columns["log_probs"],
    }
    nan = torch.tensor(torch.nan, dtype=dtype)
    inside = {name: torch.where(columns["response_mask"], values, nan) for name, values in inside.items()}
    return columns | inside | {"token_level_rewards": rewards, "token_level_scores": rewards}


@pytest.mark.parametrize("name", ADVANTAGES.names)
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=8)
def test_tokens_outside_the_mask_do_not_matter(name, lengths, seed):
    """Each sequence gets two tokens before it and three after it, with NaN in all columns but the rewards."""
    columns = usable(lengths, seed, holes=0.0)
    spans, wide = rows(columns), {}
    for key, column in columns.items():
        if key in ("group", "reward_baselines", "reward_components"):
            wide[key] = column
        elif key == "offsets":
            wide[key] = column + 5 * torch.arange(len(column))
        else:
            empty = 0 if key.startswith("token_level") or key == "response_mask" else torch.nan
            front, back = (torch.full((n,), empty, dtype=torch.float64).to(column.dtype) for n in (2, 3))
            wide[key] = torch.cat([part for row in spans for part in (front, column[row], back)])
    places = [slice(row.start + 5 * i + 2, row.stop + 5 * i + 2) for i, row in enumerate(spans)]
    found = find(name)(wide)
    for plain, part in zip(find(name)(columns), found, strict=True):
        inside = torch.cat([part[place] for place in places])
        torch.testing.assert_close(plain, inside, rtol=1e-7, atol=1e-7)
        assert not part[~wide["response_mask"]].any()


@pytest.mark.parametrize("name", ADVANTAGES.names)
@pytest.mark.parametrize("lengths", [[1], [3, 1], [0, 4], [5, 5, 5, 5], [4096, 1, 4095]])
@pytest.mark.parametrize("case", ["no response", "all alone", "equal rewards", "no rewards"])
def test_edges_give_finite_numbers_that_leave_the_inputs_alone(name, lengths, case):
    columns = usable(lengths, 1, torch.float32)
    if case == "no response":
        columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    elif case == "all alone":
        columns["group"] = torch.arange(len(lengths))
    else:
        columns["group"] = torch.zeros_like(columns["group"])
        rewards = torch.where(columns["response_mask"], 0.3 if case == "equal rewards" else 0.0, 0.0)
        columns["token_level_rewards"] = rewards
    before = {key: column.clone() for key, column in columns.items()}
    got = find(name)(columns)
    assert isinstance(got, Advantages)
    for part in got:
        assert part.dtype == torch.float32 and part.isfinite().all()
        assert not part[~columns["response_mask"]].any()
    for key, column in columns.items():
        torch.testing.assert_close(column, before[key], rtol=0, atol=0, equal_nan=True)
