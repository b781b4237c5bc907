"""`explain` for every key, and the commands that use it."""

from pathlib import Path

import pytest

from tandem.cli.check import check
from tandem.cli.config import config as config_command
from tandem.config.explain import explain
from tandem.config.root import TrainConfig
from tandem.config.schema import keys
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.errors import ConfigError
from tests.support.tiny import problem, write_rows

COMMANDS = {TrainConfig: "tandem train", SFTConfig: "tandem sft", RMConfig: "tandem rm"}


def test_every_key_of_every_command_has_its_type_default_meaning_and_readers():
    bad = []
    for root, command in COMMANDS.items():
        for name in keys(root):
            told = explain(name).partition(f"{name} ({command})\n")[2].splitlines()[:4]
            titles = [line.partition(": ")[0].strip() for line in told if line.partition(": ")[2]]
            if titles != ["type", "default", "meaning", "read by"]:
                bad.append((command, name, told))
    assert not bad


def test_examples():
    assert explain("actor_rollout_ref.actor.clip_ratio_high").splitlines() == [
        "actor_rollout_ref.actor.clip_ratio_high (tandem train)",
        "  type:    number >= 0",
        "  default: the value of actor_rollout_ref.actor.clip_ratio",
        "  meaning: How far the probability ratio may rise above 1 before it is clipped.",
        "  read by: tandem.workers.loss_terms",
    ]
    for name, line in {
        "critic.optim.lr": "default: 1e-05", "actor_rollout_ref.model.path": "default: none (required)",
        "critic.optim.betas": "type:    number >= 0 and < 1, as a list of 2",
        "trainer.max_ckpt_to_keep": "type:    integer >= 1, or null",
        "trainer.resume_from_path": "type:    text, or null",
    }.items():  # fmt: skip
        assert f"  {line}\n" in explain(name)


def test_a_section_lists_its_keys():
    lines = explain("algorithm.kl_ctrl").splitlines()
    found = [line.split(":")[0] for line in lines if line.startswith("algorithm.kl_ctrl.")]
    assert found == [f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("critic.grad_clip", "  renamed: critic.optim.clip_grad"),
        ("actor_rollout_ref.model.lora.rank", "  renamed: actor_rollout_ref.model.lora_rank"),
        ("actor_rollout_ref.actor.entropy_checkpointing", "  ignored: the backward pass"),
    ],
)
def test_a_key_of_another_name_or_without_effect(name, said):
    assert explain(name).startswith(f"{name} (tandem train)\n{said}")


def test_unknown_key():
    with pytest.raises(ConfigError) as caught:
        explain("algorithm.adv_estimatr")
    assert caught.value.remedy == "did you mean algorithm.adv_estimator?"


def test_explain_command(capsys):
    assert config_command(["explain", "trainer.nnodes", "trainer.seed"]) == 0
    out = capsys.readouterr().out
    assert "trainer.nnodes (tandem train)" in out and "trainer.seed (tandem sft)" in out
    with pytest.raises(ConfigError, match="unknown subcommand"):
        config_command(["explian", "trainer.seed"])


def test_show_command(capsys, required):
    assert config_command(["show", *required, "trainer.seed=9", "+data.seed=4"]) == 0
    shown = capsys.readouterr()
    assert "  seed: 9\n" in shown.out
    assert shown.err.startswith("note: +data.seed: ") and shown.err.count("\n") == 1
    assert config_command(["show"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in keys(TrainConfig))


def test_check_command(capsys, required, train_file, model):
    write_rows(Path(train_file), [{**problem(1, 1), "response": "2"}] * 256)
    assert check(required) == 0
    out = capsys.readouterr().out
    assert "samples per step: 64\n" in out and "the config is sound\n" in out
    assert check(["--sft", f"data.train_files={train_file}", f"model.path={model}"]) == 0
    assert capsys.readouterr().out.startswith("the config is sound\n")
