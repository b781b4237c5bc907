"""The check of packing finds models in which sequences see each other or positions count on."""

import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from docs.families import QUICK, names, tried
from tandem.cli.main import main
from tandem.errors import ModelError
from tandem.models import attention, masks, packed_check, packing, rectangles
from tandem.models.families import families, tried_with
from tandem.models.loading import load_config
from tandem.models.logits import LogitRule
from tandem.models.packed_check import check_packed
from tandem.models.packed_verdict import PackedCheck, require_sound
from tandem.models.small_copy import LONGEST, small_copy, window_limits
from tests.models.small import OTHER_HEADS, SHAPE, make_engine, save
from tests.support.marks import slow_but
from tests.support.runs import lab

__all__ = ["lab"]

SIZES = SHAPE | {"vocab_size": 40, "max_position_embeddings": 128, "initializer_range": 0.02}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONG_ROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
}
MIXED = {"layer_types": ["conv", "full_attention"]}


def folder_of(path, kind, **changes):
    """Create a folder that has only a config.json."""
    config = CONFIG_MAPPING[kind](**(SIZES | changes))
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(path)
    return path


@pytest.fixture
def llama(tmp_path):
    return save(LlamaConfig(**SHAPE | {"vocab_size": 40, "initializer_range": 0.3}), tmp_path)


@pytest.fixture
def checked(capsys):
    """Return a function that runs `tandem check --model` and returns its status and its output."""

    def run(*folder):
        status, said = main(["check", "--model", *map(str, folder)]), capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out + said.err

    return run


def test_a_sound_model(llama, checked):
    found, _ = check_packed(llama)
    assert found.gradient == 0 and found.others <= 1e-12 and found.alone < 1e-9 and found.beyond < 1e-9
    assert found.sound and torch.get_default_dtype() == torch.float32
    assert checked(llama)[0] == 0
    status, said = checked()
    assert status == 1 and "--model takes one folder" in said


def test_a_changed_model_is_checked(tmp_path, checked):
    folder = folder_of(tmp_path / "cohere", "cohere", logit_scale=1.0)
    status, said = checked(folder, "model.resize_embeddings=64")
    assert status == 0 and f"{folder} with the changes" in said
    for word, problem in (("logit_scale=0.0", "positive"), ("nosuch=1", "model.override_config.nosuch")):
        status, said = checked(folder, f"model.override_config.{word}")
        assert status == 1 and problem in said


def test_sequences_that_see_each_other(llama, monkeypatch, checked):
    """Let every token see all tokens before it, in any sequence."""

    def whole_row(rows, plan, scores):
        q, k, v = (part.transpose(0, 1)[None] for part in rows)
        return rectangles._causal(q, k, v, scores)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "rectangular", whole_row)
    found, _ = check_packed(llama)
    assert found.gradient > 0 and found.others > 1e-3 and not found.sound
    assert checked(llama)[0] == 1
    with pytest.raises(ModelError, match="packed sequences differently"):
        make_engine(llama)


def test_a_leak_of_layers_without_weights_to_speak_of(tmp_path, monkeypatch, checked):
    folder = folder_of(tmp_path, "lfm2", initializer_range=1e-4, **MIXED)
    found, _ = check_packed(folder)
    assert found.sound and found.in_rows
    monkeypatch.setattr(packed_check, "may_pack", lambda model, config: True)
    found, _ = check_packed(folder)
    assert found.gradient > 1e-3 and not found.sound_within
    with pytest.raises(ModelError, match="packed sequences differently"):
        require_sound(found, folder, 8)
    assert checked(folder)[0] == 1


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 48} | EXPERTS, 48),
        ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}, 64),
        ("mistral", {"sliding_window": 48}, 48),
    ],
)
def test_sequences_beyond_a_window_or_an_angle_limit(tmp_path, kind, changes, limit, monkeypatch, checked):
    """Let windows and angles not follow the sequences. Then they are right up to the limit."""
    folder = folder_of(tmp_path, kind, **changes)
    assert check_packed(folder)[0].sound
    monkeypatch.setattr(masks, "_limits", lambda function: (0, 0))
    monkeypatch.setattr(packed_check, "fit_angles", lambda model: None)
    found, _ = check_packed(folder)
    assert found.sound_within and not found.sound and found.limit == limit
    require_sound(found, folder, limit)
    with pytest.raises(ModelError, match="of this length"):
        require_sound(found, folder, limit + 1)
    assert checked(folder)[0] == 1


@pytest.mark.parametrize("kind", ["seed_oss", "starcoder2"])
def test_dropouts_of_any_name_are_off(tmp_path, kind):
    dropouts = {"residual_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}
    folder = folder_of(tmp_path, kind, **dropouts, sliding_window=None)
    config = load_config(folder)
    assert all(getattr(config, name, 0.0) == 0.0 for name in dropouts)
    assert check_packed(folder)[0].sound
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_pretrained(folder)).save_pretrained(folder)
    make_engine(folder)


def test_what_cannot_be_trained_is_named(tmp_path, checked):
    for kind, changes, problem in (("cohere", {"logit_scale": 0.0}, "positive"), ("bert", {}, "not causal")):
        folder = folder_of(tmp_path / kind, kind, **changes)
        with pytest.raises(ModelError, match=problem):
            check_packed(folder)
        assert checked(folder)[0] == 1


FAMILIES = {family.name: family for family in families()}


@pytest.mark.parametrize("name", slow_but(QUICK, FAMILIES))
def test_families_are_what_the_table_says(name):
    """Compare training and the native engine with transformers, beyond windows of 8 and 40 tokens."""
    if transformers.__version__ != tried_with() and name not in QUICK:
        pytest.skip(f"the table was made with transformers {tried_with()}")
    found, known = tried(name), FAMILIES[name]
    assert (found.layout, found.native, found.lora) == (known.layout, known.native, known.lora)
    assert found.layout == "packed" if name in QUICK else True
    assert not found.layout or found.error < 1e-6


@pytest.mark.slow
def test_the_table_has_every_architecture():
    if transformers.__version__ == tried_with():
        assert names() == sorted(FAMILIES)


@pytest.mark.parametrize("kind", slow_but(["cohere", "gpt2"], OTHER_HEADS))
def test_a_rule_of_logits_is_found_or_the_model_is_refused(tmp_path, kind, monkeypatch):
    folder = folder_of(tmp_path, kind, **OTHER_HEADS[kind])
    assert check_packed(folder)[0].sound_within
    monkeypatch.setattr(LogitRule, "of", lambda config: LogitRule(1.1, 9.0))
    found, _ = check_packed(folder)
    assert found.gradient == 0 and found.alone > 1e-3 and not found.sound_within


def test_train_refuses_what_check_refuses_whatever_the_rollout(lab, tmp_path, capsys):
    folder, at = folder_of(tmp_path / "model", "bert"), "actor_rollout_ref.model"
    words = lab.overrides(tmp_path / "run", actor_rollout_ref__rollout__name="hf")
    paths = (f"{at}.path={folder}", f"{at}.tokenizer_path={lab.model}")
    assert main(["train", *words, *paths]) == 1
    assert "not causal" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_small_copy_keeps_every_kind_of_layer():
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    config = CONFIG_MAPPING["qwen2"](hidden_size=4096, intermediate_size=22016, **sizes, **windows)
    small = small_copy(config)
    assert set(small.layer_types) == set(config.layer_types) == {"full_attention", "sliding_attention"}
    assert len(small.layer_types) == small.num_hidden_layers < 8
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (256, 32, 8)
    assert small.vocab_size < 100 and max(window_limits(small)) < LONGEST
    assert window_limits(config) == [4096]
    listed = {"num_hidden_layers": 20, "mlp_only_layers": [17]}  # by number
    small = small_copy(CONFIG_MAPPING["qwen3_moe"](**(SIZES | EXPERTS | listed)))
    assert small.num_hidden_layers == 3 and small.mlp_only_layers == [2]


def test_what_cannot_be_seen_is_no_proof(llama, monkeypatch):
    assert not PackedCheck(0.0, math.nan, 0.0, 0.0).sound_within
    assert not PackedCheck(0.0, 0.0, 0.0, math.nan).sound
    monkeypatch.setattr(torch.Tensor, "requires_grad", property(lambda tensor: False))
    found, _ = check_packed(llama)
    assert math.isnan(found.gradient) and not found.sound_within


def test_positions_that_count_through(llama, monkeypatch):
    class Wrong(packing.Packing):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.position_ids = 7 * self.position_ids

    monkeypatch.setattr(packing, "Packing", Wrong)
    found, _ = check_packed(llama)
    assert found.gradient == 0 and found.alone > 0.01 and not found.sound


def test_weights_with_nan_are_no_matter_of_packing(llama):
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"not finite(?s:.)*NaN"):
        make_engine(llama)
