"""The estimators give the same numbers as verl 0.9.1's functions, to 1e-5, if the equation is the same.

Tandem differs on purpose in these points:

    gpg                     verl scales by B over the number of rewards that are not 0. Tandem and the paper
                            scale by B over the number of samples in groups with a learning signal.
    rloo_vectorized         For a sample that is alone, verl gives 0. verl's rloo and Tandem give its reward.
    grpo_passk              verl raises an error for a group with a single sample.
    optimal_token_baseline  If a tool's tokens are inside a response, verl counts positions in all tokens, but
                            finds the second longest response by response tokens. Tandem counts all tokens in
                            both cases.
    gae                     Outside the mask verl leaves arbitrary numbers, Tandem has 0.
"""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tandem.algorithms.registry import advantage_estimator
from tests.algorithms import verl_peer

pytestmark = pytest.mark.verl

SAMPLES, LONGEST = 12, 40
GROUPS = [0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0]
WITH_LONERS = [0, 1, 0, 2, 1, 0, 5, 1, 0, 4, 3, 0]


BY_STD = [*((name, WITH_LONERS) for name in ("grpo", "grpo_vectorized", "gdpo")), ("grpo_passk", GROUPS)]


class Case(NamedTuple):
    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    holes: float = 0.2
    groups: list[int] = WITH_LONERS
    weighted: bool = False


CASES = [
    *(Case("gae", {"gamma": gamma, "lam": lam}) for gamma in (1.0, 0.9) for lam in (0.0, 0.95, 1.0)),
    *(
        Case(name, {"norm_adv_by_std_in_grpo": by_std}, groups=groups)
        for (name, groups), by_std in product(BY_STD, (True, False))
    ),
    *(Case("reinforce_plus_plus", {"gamma": gamma}) for gamma in (1.0, 0.9)),
    Case("rloo_vectorized", groups=GROUPS),
    *(Case(name) for name in ("reinforce_plus_plus_baseline", "rloo", "opo", "remax")),
    *(
        Case(name, {"handle_zero_tail": zero_tail}, holes, weighted=weighted)
        for name, holes in (("optimal_token_baseline", 0.0), ("tir_optimal_token_baseline", 0.3))
        for zero_tail, weighted in product((True, False), repeat=2)
    ),
]


def rectangles(case, seed):
    """Return columns, padded on the right, of responses with holes; the first token is from the policy."""
    draw = torch.Generator().manual_seed(seed)
    shape = SAMPLES, LONGEST
    lengths = torch.randint(2, LONGEST, (SAMPLES,), generator=draw)
    lengths[0], lengths[3] = LONGEST, 0
    mask = torch.arange(LONGEST) < lengths[:, None]
    mask &= (torch.rand(shape, generator=draw) >= case.holes) | (torch.arange(LONGEST) == 0)
    log_probs = -torch.rand(shape, generator=draw)
    columns = {
        "token_level_rewards": torch.randn(shape, generator=draw) * mask,
        "values": torch.randn(shape, generator=draw),
        "response_mask": mask.float(),
        "old_log_probs": log_probs,
        "sum_pi_squared": log_probs.exp() ** 2 + 0.1,
        "reward_baselines": torch.rand(SAMPLES, generator=draw),
        "reward_components": torch.rand(SAMPLES, 2, generator=draw),
        "group": torch.tensor(case.groups),
    }
    weights = {"rollout_is_weights": 2 * torch.rand(shape, generator=draw)} if case.weighted else {}
    return columns | weights


def ours(case, columns):
    """Call Tandem's estimator on flat columns, with two prompt tokens per response, and pad the result."""
    prompt = torch.zeros(SAMPLES, 2)
    flat = {
        name: torch.cat((prompt, column), 1).flatten() if column.shape == (SAMPLES, LONGEST) else column
        for name, column in columns.items()
    }
    flat["response_mask"] = flat["response_mask"].bool()
    flat.setdefault("rollout_is_weights", torch.ones(len(flat["response_mask"])))
    flat["offsets"] = torch.arange(SAMPLES + 1) * (LONGEST + 2)
    got = advantage_estimator(case.name)(flat, **case.options)
    return tuple(part.view(SAMPLES, -1)[:, 2:] for part in got)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    inputs = [(case.name, rectangles(case, i), case.options) for i, case in enumerate(CASES)]
    return verl_peer.answers("advantages", inputs, tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=f"{i}-{case.name}", marks=pytest.mark.equation(f"advantages/{case.name}"))
        for i, case in enumerate(CASES)
    ],
)
def test_the_same_numbers(number, answers):
    columns = rectangles(CASES[number], number)
    inside = columns["response_mask"].bool()
    assert int(inside.sum()) > SAMPLES
    for got, want in zip(ours(CASES[number], columns), answers[number], strict=True):
        torch.testing.assert_close(got[inside], want[inside], rtol=1e-5, atol=1e-5)


@pytest.mark.equation("advantages/gdpo", "advantages/gpg")
def test_weights_of_components_and_gpgs_factor(tmp_path):
    """GDPO equals verl's, which reads the weights from the config; GPG differs only by its factor."""
    weighted = Case("gdpo", {"gdpo_reward_weights": (2.0, 0.5)}, groups=GROUPS)
    factor = Case("gpg", groups=GROUPS)
    first, columns = rectangles(weighted, 0), rectangles(factor, 1)
    scores = torch.tensor([1.0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0])  # group 2 never succeeds, group 1 always
    columns["token_level_rewards"] = torch.zeros(SAMPLES, LONGEST)
    columns["token_level_rewards"][:, 0] = scores * columns["response_mask"][:, 0]
    inputs = [("gdpo", first, weighted.options), ("gpg", columns, {})]
    (components, _), (by_nonzero, _) = verl_peer.answers("advantages", inputs, tmp_path)
    place, inside = first["response_mask"].bool(), columns["response_mask"].bool()
    torch.testing.assert_close(ours(weighted, first)[0][place], components[place], rtol=1e-5, atol=1e-5)
    nonzero, teaching = int((columns["token_level_rewards"].sum(1) != 0).sum()), 5
    scale = (SAMPLES / teaching) / (SAMPLES / nonzero)
    torch.testing.assert_close(ours(factor, columns)[0][inside], scale * by_nonzero[inside])
