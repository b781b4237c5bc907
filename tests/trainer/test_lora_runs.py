import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as SCORER

from tandem.cli.main import main
from tandem.errors import CheckpointError
from tandem.offline.export import export_checkpoint
from tests.support.runs import assert_same, without_times
from tests.support.school import school

__all__ = ["school"]

WORDS = "M.lora_rank=8 M.lora_alpha=16 A.use_kl_loss=true A.ppo_mini_batch_size=2 steps=4 trainer.save_freq=2"
IDS = torch.tensor([[5, 6, 13, 7, 4, 1], [9, 3, 14, 6, 12, 1]])


@pytest.fixture(scope="module")
def words(lab):
    return (WORDS, lab.reward("sum(c.isdigit() for c in response) / 6"))


@pytest.fixture(scope="module")
def whole(lab, words):
    return lab.run("whole", *words)


def log_probs(model):
    with torch.no_grad():
        return torch.log_softmax(model(IDS).logits.double(), -1)


def test_adapters_alone_move(lab, whole):
    base = AutoModelForCausalLM.from_pretrained(lab.model).state_dict()
    moved = {name for name, value in whole.weights().items() if not torch.equal(value, base[name])}
    assert moved == {name for name in whole.weights() if name.endswith("_proj.weight")}
    module = whole.actor.actor.module
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter.full_tensor(), base[module.hf_name(name)])
    first, last = whole.rows[0], whole.rows[-1]
    assert set(whole.actor.engines) == {"actor"}
    assert first["actor/grad_norm"] > 0 and first["actor/kl"] >= 0 and last["actor/kl"] > 1e-4
    for row in whole.rows:
        assert row["rollout/log_prob_diff_max"] < 1e-4  # in fp32
    assert "parameters are trained" in whole.log


def test_a_resumed_run_equals_the_whole_one(lab, words, whole):
    assert_same(lab.resumed("stopped", *words, at=3), whole)


def test_exports_compute_what_the_adapters_do(lab, whole, tmp_path):
    assert main(["export", str(whole.folder), str(tmp_path / "merged")]) == 0
    assert main(["export", str(whole.folder), str(tmp_path / "adapter"), "--adapter"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    named = dict(merged.named_parameters())
    for name, value in whole.weights().items():
        assert torch.allclose(named[name].float(), value, rtol=0, atol=1e-6), name
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not {name for name in files if name.startswith("model")}
    base = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64)
    before = log_probs(base)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    names = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert adapted.peft_config["default"].target_modules == names
    found, wanted = log_probs(adapted), log_probs(merged)
    assert (found - before).abs().max() > 1e-3
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    assert all(name.startswith("base_model.model.model.layers.") for name in tensors)


@pytest.mark.slow
def test_a_base_that_changed_is_not_merged(lab, words, whole, tmp_path):
    file = lab.model / "model.safetensors"
    kept = file.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(lab.model)
    try:
        with torch.no_grad():
            model.model.norm.weight[3] += 0.01
        model.save_pretrained(lab.model)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight: the model's folder does not have"):
            export_checkpoint(whole.folder, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        export_checkpoint(whole.folder, tmp_path / "adapter", adapter=True)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight: ") as caught:
            lab.run("whole", *words, "steps=6")
        assert "1 of " in str(caught.value) and "model.path" in str(caught.value)
    finally:
        file.write_bytes(kept)


def test_a_run_without_adapters_has_none_to_export(lab, tmp_path):
    run = lab.run("full", "steps=1 trainer.save_freq=1")
    with pytest.raises(CheckpointError, match="has no adapters"):
        export_checkpoint(run.folder, tmp_path / "out", adapter=True)


@pytest.mark.slow
def test_a_critic_with_adapters_learns_and_goes_on(lab):
    words = "GAE critic.model.lora_rank=4 critic.optim.lr=0.01 trainer.save_freq=2"
    run = lab.run("critic", words, "steps=4")
    resumed = lab.resumed("critic_resumed", words, "steps=4", at=3)
    assert math.isfinite(run.rows[-1]["critic/loss"])
    assert without_times(resumed.rows) == without_times(run.rows)


@pytest.mark.parametrize("task", ["sft", "rm"])
def test_fine_tuning_and_a_reward_model(school, tmp_path, task):
    run = school.run(task, f"adapted_{task}", "model.lora_rank=8 trainer.save_freq=6")
    kind, more = (AutoModelForCausalLM, {}) if task == "sft" else (SCORER, {"num_labels": 1})
    out = export_checkpoint(run.folder, tmp_path / "merged")
    merged = kind.from_pretrained(out, dtype=torch.float64)
    adapter = export_checkpoint(run.folder, tmp_path / "adapter", adapter=True)
    base = kind.from_pretrained(school.model, dtype=torch.float64, **more)
    base.config.pad_token_id = AutoTokenizer.from_pretrained(school.model).pad_token_id
    with torch.no_grad():
        wanted, found = merged(IDS).logits, PeftModel.from_pretrained(base, adapter)(IDS).logits
    assert wanted.abs().max() > 1e-3
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    assert task == "rm" or run.rows[-1]["sft/loss"] < run.rows[0]["sft/loss"]
