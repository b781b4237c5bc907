import sys

import pytest
import torch

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.advantages.grpo import grpo
from tandem.algorithms.registry import ADVANTAGES, Advantages, AdvantageSpec, Registry, policy_loss
from tandem.algorithms.registry import advantage_estimator as find
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
NEW_FILE = """
from tandem.algorithms.registry import Advantages, register_advantage

@register_advantage('constant')
def constant(response_mask, *, height=1.0):
    return Advantages(response_mask * height, response_mask * height)
"""
COLUMNS = {
    **{"token_level_rewards": torch.tensor([0.0, 2.0]), "response_mask": torch.tensor([False, True])},
    **{"offsets": torch.tensor([0, 2]), "group": torch.tensor([0]), "values": torch.zeros(2)},
}


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    return path


def refused(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return caught.value


BY_STD = {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}
OF_GRPO = grpo, "token_level_rewards response_mask offsets group", BY_STD
OF_GAE = gae, "token_level_rewards values response_mask offsets", {"gamma": 1.0, "lam": 1.0}


@pytest.mark.parametrize(
    ("name", "function", "columns", "options"),
    [("gae", *OF_GAE), ("grpo", *OF_GRPO), ("grpo_vectorized", *OF_GRPO)],
)
def test_the_signature_is_the_declaration(name, function, columns, options):
    spec = find(name)
    assert (spec.fn, spec.columns, spec.needs_critic) == (function, tuple(columns.split()), name == "gae")
    assert dict(spec.options) == options
    got = spec(COLUMNS)
    want = function(*(COLUMNS[column] for column in spec.columns))
    assert torch.equal(got.advantages, want.advantages)
    loss = policy_loss("vanilla")
    assert loss.columns == ("log_probs", "old_log_probs", "advantages")
    assert dict(loss.options) == {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def test_options_come_from_the_shared_keys_and_from_its_own():
    spec, shared = find("gae"), {"gamma": 0.9, "lam": 1, "norm_adv_by_std_in_grpo": True}
    assert spec.select_options(shared, {}) == {"gamma": 0.9, "lam": 1}
    assert spec.select_options(shared, {"lam": 0.5}) == {"gamma": 0.9, "lam": 0.5}
    assert "'gamma'" in refused(spec.select_options, shared, {"gama": 0.5}).remedy
    for wrong in ("1.0", True, None):
        assert refused(spec.select_options, {}, {"gamma": wrong}).expected == "float"
    grpo_options = find("grpo").select_options
    assert refused(grpo_options, {"norm_adv_by_std_in_grpo": 1}, {}).expected == "bool"


def test_unknown_name_shows_the_nearest():
    error = refused(find, "grpoo")
    assert "'grpo'" in error.remedy and "reinforce_plus_plus_baseline" in error.expected
    assert "own function" in refused(policy_loss, "zzz").remedy


def test_aliases_and_taken_names():
    assert ADVANTAGES.aliases == {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
    registry = Registry(AdvantageSpec)
    assert registry.register("plain", "other")(grpo) is grpo
    assert registry.find("other") is registry.find("plain")
    assert registry.find("plain").fn is grpo
    assert (registry.names, registry.aliases) == (("plain",), {"other": "plain"})
    for names in (("plain",), ("other",), ("new", "plain")):
        refused(registry.register(*names), gae)


def test_a_users_estimator_from_a_file_and_from_a_module(own_file, monkeypatch):
    spec = find(f"{own_file}:mean_baseline")
    assert spec.columns == ("token_level_rewards", "response_mask")
    assert dict(spec.options) == {"scale": 1.0, "centre": True}
    got = spec(COLUMNS, scale=3.0)
    assert isinstance(got, Advantages) and got.advantages.tolist() == [0.0, 6.0]
    assert find(f"{own_file}:mean_baseline").fn is spec.fn
    monkeypatch.syspath_prepend(str(own_file.parent))
    monkeypatch.setitem(sys.modules, "mine", None)  # so that the import below is undone after the test
    monkeypatch.delitem(sys.modules, "mine")
    assert find("mine:mean_baseline")(COLUMNS).returns.tolist() == [0.0, 2.0]
    assert find("tandem.algorithms.advantages.gae:gae") is find("gae")


def test_an_option_of_several_numbers(own_file):
    spec = find(f"{own_file}:with_weights")
    assert spec.select_options({}, {"weights": [3, 4.5]}) == {"weights": (3, 4.5)}
    assert spec(COLUMNS, weights=(0.0, 5.0)).advantages.tolist() == [0.0, 5.0]
    for wrong in (1.0, ["a"], "12"):
        assert refused(spec.select_options, {}, {"weights": wrong}).expected == "a list of numbers"


def test_a_users_loss_from_a_file(own_file):
    columns = {"log_probs": torch.tensor([2.0]), "advantages": torch.tensor([3.0])}
    losses, metrics = policy_loss(f"{own_file}:own_loss")(columns, power=1)
    assert (losses.tolist(), metrics["magnitude"].tolist()) == ([-6.0], [6.0])


def test_a_wrong_signature_shows_the_expected_one(own_file):
    text = str(refused(find, f"{own_file}:broken"))
    assert "'response_masks' is not a column (did you mean 'response_mask'?)" in text
    assert all(wrong in text for wrong in ("'gamma' is not a column", "'*rest'", "option 'lam'"))
    assert "def broken(token_level_rewards, response_masks, gamma, *rest, lam=None)" in text
    assert "def function(COLUMN, ..., *, OPTION=DEFAULT, ...) -> Advantages(advantages, returns)" in text
    assert all(f"\n      {column}: (" in text for column in AdvantageSpec.known_columns)
    another_kind = refused(policy_loss, f"{own_file}:mean_baseline")
    assert "'token_level_rewards' is not a column" in str(another_kind)


@pytest.mark.parametrize(
    ("find", "function", "got"),
    [
        (find, "wrong_shape", "a tensor of shape ()"),
        (policy_loss, "wrong_loss", "shape (), {}"),
        (policy_loss, "wrong_metric", "mean: a tensor of shape ()"),
    ],
)
def test_a_wrong_result_is_refused(own_file, find, function, got):
    error = refused(find(f"{own_file}:{function}"), COLUMNS | {"log_probs": torch.zeros(2)})
    assert got in error.got and "(2,)" in error.expected


@pytest.mark.parametrize(
    ("reference", "telling"),
    [
        ("{folder}/absent.py:f", "absent.py"),
        ("no_such_package.module:f", "no_such_package"),
        ("{folder}/mine.py:absent", "expected: ['broken', 'mean_baseline'"),
        ("{folder}/mine.py:number", "no such function"),
        ("{folder}/syntax.py:f", "SyntaxError"),
        (":f", "could not be imported"),
    ],
)
def test_a_function_that_is_not_there(own_file, reference, telling):
    (own_file.parent / "syntax.py").write_text("def f(:\n")
    assert telling in str(refused(find, reference.format(folder=own_file.parent)))


def test_a_further_algorithm_is_one_new_file(tmp_path, monkeypatch):
    package = tmp_path / "more_estimators"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constant.py").write_text(NEW_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ADVANTAGES, "_specs", dict(ADVANTAGES._specs))
    import_submodules("more_estimators", [str(package)])
    assert find("constant")(COLUMNS, height=2.0).returns.tolist() == [0.0, 2.0]
