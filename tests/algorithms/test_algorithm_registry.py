from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.advantages.grpo import grpo
from tandem.algorithms.registry import (
    ADVANTAGES,
    POLICY_LOSSES,
    Advantages,
    AdvantageSpec,
    Registry,
    advantage_estimator,
    policy_loss,
)
from tandem.errors import ConfigError
from tandem.loading import import_submodules

OWN_FILE = """
def mean_baseline(token_level_rewards, response_mask, *, scale=1.0, centre=True):
    advantages = token_level_rewards * response_mask * scale
    return advantages, advantages

def own_loss(log_probs, advantages, *, power=2):
    losses = -(log_probs * advantages) ** power
    return losses, {"magnitude": losses.detach().abs()}

def broken(token_level_rewards, response_masks, gamma, *rest, lam=None): ...
def wrong_shape(response_mask): return response_mask.sum(), response_mask.sum()
def wrong_loss(log_probs): return log_probs.sum(), {}
def wrong_metric(log_probs): return log_probs, {"mean": log_probs.mean()}
number = 3

def with_weights(response_mask, *, weights=(1.0, 2.0)):
    level = response_mask * weights[1]
    return level, level
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    return path


def columns() -> dict[str, torch.Tensor]:
    return {
        "token_level_rewards": torch.tensor([0.0, 2.0]),
        "response_mask": torch.tensor([False, True]),
        "offsets": torch.tensor([0, 2]),
        "group": torch.tensor([0]),
        "values": torch.zeros(2),
    }


def test_what_is_registered() -> None:
    assert ADVANTAGES.names == (
        "dr_grpo", "gae", "gdpo", "gpg", "grpo", "grpo_passk", "maxrl", "opo", "optimal_token_baseline",
        "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
        "tir_optimal_token_baseline", "vtrace",
    )  # fmt: skip
    assert ADVANTAGES.aliases == {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
    assert {"bypass_mode", "gspo", "kl_cov", "vanilla"} <= set(POLICY_LOSSES.names)


def test_the_signature_is_the_declaration() -> None:
    spec = advantage_estimator("gae")
    assert (spec.name, spec.fn) == ("gae", gae)
    assert spec.columns == ("token_level_rewards", "values", "response_mask", "offsets")
    assert dict(spec.options) == {"gamma": 1.0, "lam": 1.0}
    assert spec.needs_critic
    spec = advantage_estimator("grpo")
    assert spec.columns == ("token_level_rewards", "response_mask", "offsets", "group")
    assert dict(spec.options) == {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}
    assert not spec.needs_critic
    loss = policy_loss("vanilla")
    assert loss.columns == ("log_probs", "old_log_probs", "advantages")
    assert dict(loss.options) == {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def test_a_spec_calls_its_function_with_the_columns_it_names() -> None:
    got = advantage_estimator("grpo")(columns(), norm_adv_by_std_in_grpo=False)
    want = grpo(
        *(columns()[name] for name in advantage_estimator("grpo").columns), norm_adv_by_std_in_grpo=False
    )
    assert torch.equal(got.advantages, want.advantages)


def test_options_come_from_the_shared_keys_and_from_its_own() -> None:
    spec = advantage_estimator("gae")
    shared = {"gamma": 0.9, "lam": 1, "norm_adv_by_std_in_grpo": True}
    assert spec.select_options(shared, {}) == {"gamma": 0.9, "lam": 1}
    assert spec.select_options(shared, {"lam": 0.5}) == {"gamma": 0.9, "lam": 0.5}
    with pytest.raises(ConfigError, match="did you mean 'gamma'"):
        spec.select_options(shared, {"gama": 0.5})
    for wrong in ("1.0", True, None):
        with pytest.raises(ConfigError, match="expected: float"):
            spec.select_options({}, {"gamma": wrong})
    with pytest.raises(ConfigError, match="expected: bool"):
        advantage_estimator("grpo").select_options({"norm_adv_by_std_in_grpo": 1}, {})


def test_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'grpo'(?s:.)*") as caught:
        advantage_estimator("grpoo")
    assert "reinforce_plus_plus_baseline" in str(caught.value)
    with pytest.raises(ConfigError, match="own function"):
        policy_loss("zzz")


def test_aliases_and_taken_names() -> None:
    registry = Registry(AdvantageSpec)
    assert registry.register("plain", "other")(grpo) is grpo
    assert registry.find("other") is registry.find("plain")
    assert registry.find("plain").fn is grpo
    assert registry.names == ("plain",)
    assert registry.aliases == {"other": "plain"}
    for name, *aliases in (("plain",), ("other",), ("new", "plain")):
        with pytest.raises(ConfigError, match="already has this name"):
            registry.register(name, *aliases)(gae)


def test_a_users_estimator_from_a_file(own_file: Path) -> None:
    spec = advantage_estimator(f"{own_file}:mean_baseline")
    assert spec.columns == ("token_level_rewards", "response_mask")
    assert dict(spec.options) == {"scale": 1.0, "centre": True}
    got = spec(columns(), scale=3.0)
    assert isinstance(got, Advantages)
    assert got.advantages.tolist() == [0.0, 6.0]
    assert advantage_estimator(f"{own_file}:mean_baseline").fn is spec.fn


def test_an_option_of_several_numbers(own_file: Path) -> None:
    spec = advantage_estimator(f"{own_file}:with_weights")
    assert spec.select_options({}, {"weights": [3, 4.5]}) == {"weights": (3, 4.5)}
    assert spec(columns(), weights=(0.0, 5.0)).advantages.tolist() == [0.0, 5.0]
    for wrong in (1.0, ["a"], "12"):
        with pytest.raises(ConfigError, match="expected: a list of numbers"):
            spec.select_options({}, {"weights": wrong})


def test_a_users_loss_from_a_file(own_file: Path) -> None:
    spec = policy_loss(f"{own_file}:own_loss")
    losses, metrics = spec({"log_probs": torch.tensor([2.0]), "advantages": torch.tensor([3.0])}, power=1)
    assert losses.tolist() == [-6.0]
    assert metrics["magnitude"].tolist() == [6.0]


def test_a_users_function_from_a_module(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own_file.parent))
    monkeypatch.setitem(sys.modules, "mine", None)  # so that the import below is undone after the test
    monkeypatch.delitem(sys.modules, "mine")
    assert advantage_estimator("mine:mean_baseline")(columns()).returns.tolist() == [0.0, 2.0]


def test_a_registered_function_keeps_its_declaration_when_named_by_module() -> None:
    spec = advantage_estimator("tandem.algorithms.advantages.gae:gae")
    assert spec is advantage_estimator("gae")


def test_a_wrong_signature_shows_the_expected_one(own_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        advantage_estimator(f"{own_file}:broken")
    text = str(caught.value)
    assert "'response_masks' is not a column (did you mean 'response_mask'?)" in text
    assert "'gamma' is not a column" in text
    assert "'*rest'" in text
    assert "option 'lam'" in text
    assert "got:      def broken(token_level_rewards, response_masks, gamma, *rest, lam=None)" in text
    assert "def function(COLUMN, ..., *, OPTION=DEFAULT, ...) -> Advantages(advantages, returns)" in text
    for column in AdvantageSpec.known_columns:
        assert f"\n      {column}: (" in text


def test_a_column_of_another_kind_is_refused(own_file: Path) -> None:
    with pytest.raises(ConfigError, match="'token_level_rewards' is not a column"):
        policy_loss(f"{own_file}:mean_baseline")


def test_a_wrong_result_is_refused(own_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"a tensor of shape \(\)(?s:.)*two tensors of shape \(2,\)"):
        advantage_estimator(f"{own_file}:wrong_shape")(columns())
    for function, got in (
        ("wrong_loss", r"shape \(\), \{\}"),
        ("wrong_metric", r"mean: a tensor of shape \(\)"),
    ):
        with pytest.raises(ConfigError, match=got):
            policy_loss(f"{own_file}:{function}")({"log_probs": torch.zeros(2)})


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{folder}/absent.py:f", "no file .*absent.py"),
        ("no_such_package.module:f", "no_such_package"),
        ("{folder}/mine.py:absent", r"expected: \['broken', 'mean_baseline'"),
        ("{folder}/mine.py:number", "no such function"),
        ("{folder}/syntax.py:f", "SyntaxError"),
        (":f", "could not be imported"),
    ],
)
def test_a_function_that_is_not_there(own_file: Path, reference: str, message: str) -> None:
    (own_file.parent / "syntax.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=message):
        advantage_estimator(reference.format(folder=own_file.parent))


def test_a_further_algorithm_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "more_estimators"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constant.py").write_text(
        "from tandem.algorithms.registry import Advantages, register_advantage\n\n"
        "@register_advantage('constant')\n"
        "def constant(response_mask, *, height=1.0):\n"
        "    level = response_mask * height\n"
        "    return Advantages(level, level)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ADVANTAGES, "_specs", dict(ADVANTAGES._specs))
    import_submodules("more_estimators", [str(package)])
    assert advantage_estimator("constant")(columns(), height=2.0).returns.tolist() == [0.0, 2.0]
