"""Runs with `override_config` and `resize_embeddings`: they learn, resume, and export what they trained."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.config.changed_models import stored_config
from tandem.errors import ConfigError
from tandem.offline.export import export_checkpoint
from tandem.protocol import DataProto, Ragged
from tests.engines.train.synthetic import output
from tests.support.runs import Lab, assert_same
from tests.support.school import school
from tests.support.tiny import make_model

__all__ = ["school"]

YARN = "M.override_config.rope_scaling={type: yarn, factor: 4.0, original_max_position_embeddings: 8}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Return a lab whose model has 8 positions, fewer than a prompt and its response."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    make_model(made.model, max_position_embeddings=8)
    return made


@pytest.fixture(scope="module")
def whole(lab):
    return lab.run("whole", YARN, "M.resize_embeddings=64 GAE trainer.save_freq=1", lab.letters)


def test_without_the_change_the_sequences_are_too_long(lab):
    with pytest.raises(ConfigError, match="max_position_embeddings = 8"):
        lab.run("short", "steps=1")


def test_rollout_and_trainer_agree_beyond_the_original_positions(whole):
    samples = whole.samples(2)
    assert max(map(len, samples["tokens"])) > 8
    assert max(row["rollout/log_prob_diff_max"] for row in whole.rows if row["step"]) < 1e-4
    critic = whole.trainer.roles.critic._workers._worker.engine
    assert critic.module.model.get_input_embeddings().weight.shape[0] == 64


def test_the_export_has_the_changes_and_computes_the_same(lab, whole, tmp_path):
    out = export_checkpoint(whole.folder, tmp_path / "out")
    stored = stored_config(out)
    assert stored["vocab_size"] == 64 and stored["rope_parameters"]["factor"] == 4.0
    assert not (out / ".tandem.json").exists() and not any(path.is_symlink() for path in out.iterdir())
    model = AutoModelForCausalLM.from_pretrained(out)
    for name, value in whole.weights().items():
        assert torch.equal(model.state_dict()[name], value), name
    tokens = torch.randint(64, (30,))
    found = output(whole.actor.actor, DataProto({"tokens": Ragged.from_list([tokens])})).values[1:]
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    wanted = logits.gather(-1, tokens[1:, None])[:, 0]
    assert torch.allclose(found.double(), wanted, rtol=0, atol=1e-5)


def test_a_resumed_run_equals_the_whole_one(lab, whole):
    words = (YARN, "M.resize_embeddings=64 GAE trainer.save_freq=1", lab.letters)
    assert_same(lab.resumed("stopped", *words, at=2), whole)
    with pytest.raises(ConfigError, match="override_config"):
        lab.run("stopped", YARN.replace("4.0", "8.0"), *words[1:], "steps=3")


def test_new_rows_learn(whole):
    """Rows of tokens that never occur change too, because their logits are in every softmax."""
    head = whole.weights()["lm_head.weight"]
    original = AutoModelForCausalLM.from_pretrained(whole.trainer.config.actor_rollout_ref.model.path)
    assert (head[46:] - original.lm_head.weight[46:]).abs().amax(1).min() > 0


def test_rows_without_a_token_are_sampled_as_nothing(lab, tmp_path):
    """Ids that the tokenizer cannot decode are written as no text, and their log-probs agree as well."""
    path = make_model(tmp_path / "padded", vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight[46:] *= 6  # mostly such ids are sampled
    model.save_pretrained(path)
    run = lab.run("padded", f"M.path={path}", lab.reward("len(response) / 6"))
    samples = run.samples(1)
    for tokens, mask, text in zip(
        samples["tokens"], samples["response_mask"], samples["response_text"], strict=True
    ):
        written = [token for token, own in zip(tokens, mask, strict=True) if own]
        assert len(text) == sum(2 < token < 46 for token in written)
    assert any(token >= 46 for row in samples["tokens"] for token in row)
    assert max(row["rollout/log_prob_diff_max"] for row in run.rows if row["step"]) < 1e-4


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_fine_tuning_and_its_export(school, tmp_path, lora):
    words = f"model.resize_embeddings=128 model.lora_rank={lora} trainer.save_freq=6"
    run = school.run("sft", f"resized_{lora}", words)
    model = AutoModelForCausalLM.from_pretrained(export_checkpoint(run.folder, tmp_path / "out"))
    assert (
        model.lm_head.weight.shape[0] == json.loads((tmp_path / "out/config.json").read_text())["vocab_size"]
    )
    assert model.lm_head.weight.shape[0] == 128
    if lora:
        said: list[str] = []
        adapter = export_checkpoint(run.folder, tmp_path / "adapter", adapter=True, say=said.append)
        config = json.loads((adapter / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(school.model)
        assert "resize_embeddings=128" in said[-1]
    else:
        assert all(torch.equal(model.state_dict()[name], value) for name, value in run.weights().items())
