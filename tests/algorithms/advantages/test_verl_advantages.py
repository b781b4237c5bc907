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

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.algorithms.registry import advantage_estimator

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".peers" / "verl" / "bin" / "python"
SAMPLES, LONGEST = 12, 40
GROUPS = [0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0]
WITH_LONERS = [0, 1, 0, 2, 1, 0, 5, 1, 0, 4, 3, 0]


class Case(NamedTuple):
    name: str
    options: dict[str, Any] = {}  # noqa: RUF012
    holes: float = 0.2
    groups: list[int] = GROUPS
    weighted: bool = False


def baselines(name: str, holes: float) -> list[Case]:
    return [
        Case(name, {"handle_zero_tail": zero_tail}, holes, WITH_LONERS, weighted)
        for zero_tail in (True, False)
        for weighted in (True, False)
    ]


CASES = [
    *(Case("gae", {"gamma": gamma, "lam": lam}) for gamma in (1.0, 0.9) for lam in (0.0, 0.95, 1.0)),
    *(
        Case(name, {"norm_adv_by_std_in_grpo": by_std}, groups=groups)
        for by_std in (True, False)
        for name, groups in (
            ("grpo", WITH_LONERS),
            ("grpo_vectorized", WITH_LONERS),
            ("gdpo", WITH_LONERS),
            ("grpo_passk", GROUPS),
        )
    ),
    *(Case("reinforce_plus_plus", {"gamma": gamma}) for gamma in (1.0, 0.9)),
    Case("reinforce_plus_plus_baseline", groups=WITH_LONERS),
    Case("rloo", groups=WITH_LONERS),
    Case("rloo_vectorized"),
    Case("opo", groups=WITH_LONERS),
    Case("remax"),
    *baselines("optimal_token_baseline", 0.0),
    *baselines("tir_optimal_token_baseline", 0.3),
]


def rectangles(case: Case, seed: int) -> dict[str, Tensor]:
    """Return padded columns of responses with several lengths, with holes and with one empty response.

    Padding is on the right. The first token of each response is always from the policy.
    """
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


def ours(case: Case, columns: dict[str, Tensor]) -> tuple[Tensor, ...]:
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
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tensor, Tensor]]:
    assert PYTHON.exists(), "make peers"
    folder = tmp_path_factory.mktemp("verl")
    torch.save(
        [(case.name, rectangles(case, i), case.options) for i, case in enumerate(CASES)], folder / "in"
    )
    script = ROOT / "benchmarks" / "peers" / "verl_advantages.py"
    subprocess.run([PYTHON, script, folder / "in", folder / "out"], check=True, timeout=240)
    found: list[tuple[Tensor, Tensor]] = torch.load(folder / "out", weights_only=False)
    return found


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=f"{i}-{case.name}", marks=pytest.mark.equation(f"advantages/{case.name}"))
        for i, case in enumerate(CASES)
    ],
)
def test_the_same_numbers(number: int, answers: list[tuple[Tensor, Tensor]]) -> None:
    case = CASES[number]
    columns = rectangles(case, number)
    inside = columns["response_mask"].bool()
    assert int(inside.sum()) > SAMPLES
    for got, want in zip(ours(case, columns), answers[number], strict=True):
        torch.testing.assert_close(got[inside], want[inside], rtol=1e-5, atol=1e-5)


@pytest.mark.equation("advantages/gdpo", "advantages/gpg")
def test_weights_of_components_and_gpgs_factor(tmp_path: Path) -> None:
    """GDPO equals verl's, which reads the weights from the config; GPG differs only by its factor."""
    weighted = Case("gdpo", {"gdpo_reward_weights": (2.0, 0.5)})
    factor = Case("gpg")
    columns = rectangles(factor, 1)
    scores = torch.tensor([1.0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0])  # group 2 never succeeds, group 1 always
    columns["token_level_rewards"] = torch.zeros(SAMPLES, LONGEST)
    columns["token_level_rewards"][:, 0] = scores * columns["response_mask"][:, 0]
    torch.save([("gdpo", rectangles(weighted, 0), weighted.options), ("gpg", columns, {})], tmp_path / "in")
    script = ROOT / "benchmarks" / "peers" / "verl_advantages.py"
    subprocess.run([PYTHON, script, tmp_path / "in", tmp_path / "out"], check=True, timeout=240)
    (components, _), (by_nonzero, _) = torch.load(tmp_path / "out", weights_only=False)
    inside = columns["response_mask"].bool()
    got = ours(weighted, rectangles(weighted, 0))[0]
    place = rectangles(weighted, 0)["response_mask"].bool()
    torch.testing.assert_close(got[place], components[place], rtol=1e-5, atol=1e-5)
    rewards = columns["token_level_rewards"].sum(1)
    nonzero, teaching = int((rewards != 0).sum()), 5
    scale = (SAMPLES / teaching) / (SAMPLES / nonzero)
    torch.testing.assert_close(ours(factor, columns)[0][inside], scale * by_nonzero[inside])
