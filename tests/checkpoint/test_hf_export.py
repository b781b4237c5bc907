import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)
from transformers.utils import logging

from tandem.checkpoint.hf_export import export
from tandem.errors import CheckpointError

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_model(config_class=Qwen2Config, tied: bool = False, dtype=torch.float32):
    torch.manual_seed(3)
    config = config_class(**SIZES, tie_word_embeddings=tied, eos_token_id=7)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture(scope="module")
def tokenizer():
    characters = {chr(ord("A") + i): i for i in range(50)}
    return Qwen2Tokenizer(vocab=characters, merges=[], unk_token="A", eos_token="H", pad_token="B")


def logits(model):
    with torch.no_grad():
        return model(torch.arange(20).reshape(2, 10)).logits


def reused_buffer(model):
    """Yield every weight in the same buffer, as an engine that gathers shards may do."""
    buffer = torch.empty(max(p.numel() for p in model.parameters()))
    for name, parameter in model.named_parameters():
        view = buffer[: parameter.numel()].view(parameter.shape)
        view.copy_(parameter.detach())
        yield name, view


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 12_000])
def test_transformers_loads_identical_logits(
    tmp_path, tokenizer, config_class, tied, max_shard_bytes, capsys
):
    model = make_model(config_class, tied)
    logging.enable_progress_bar()
    out = export(
        reused_buffer(model), model.config, tokenizer.save_pretrained, tmp_path / "out", torch.float32,
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    assert capsys.readouterr() == ("", "")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(out)("DF")["input_ids"] == [3, 5]
    shards = sorted(out.glob("*.safetensors"))
    if max_shard_bytes == 10**9:
        assert [shard.name for shard in shards] == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == [shard.name for shard in shards]
        assert len(shards) > 3
        assert all(shard.stat().st_size < 12_000 + 4096 for shard in shards)
    assert not list(tmp_path.glob("*.tmp"))


def test_both_names_of_a_tied_weight(tmp_path, tokenizer):
    model = make_model(tied=True)
    weights = dict(model.named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in weights
    export(weights.items(), model.config, tokenizer.save_pretrained, tmp_path / "both", torch.float32)
    only_head = {name: w for name, w in weights.items() if name != "model.embed_tokens.weight"}
    export(only_head.items(), model.config, tokenizer.save_pretrained, tmp_path / "head", torch.float32)
    for name in ("both", "head"):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)), logits(model))
    weights["lm_head.weight"] = weights["lm_head.weight"].detach() + 1e-3
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        export(
            weights.items(), model.config, tokenizer.save_pretrained, tmp_path / "different", torch.float32
        )
    assert not (tmp_path / "different").exists()


def test_dtype_is_that_of_the_files_and_the_config(tmp_path, tokenizer):
    model = make_model()
    before = model.config.to_dict()
    out = export(
        model.named_parameters(), model.config, tokenizer.save_pretrained, tmp_path / "bf16", torch.bfloat16
    )
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert model.config.to_dict() == before


def test_weights_that_do_not_fit(tmp_path, tokenizer):
    model = make_model()
    weights = dict(model.named_parameters())
    norm = "model.norm.weight"
    wrong = {
        "missing": {name: w for name, w in weights.items() if name != norm},
        r"model\.extra": {**weights, "model.extra": torch.zeros(1)},
        r"torch\.Size\(\[31\]\)": {**weights, norm: torch.zeros(31)},
    }
    for message, bad in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            export(bad.items(), model.config, tokenizer.save_pretrained, tmp_path / "out", torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_and_an_empty_one_is_taken(tmp_path, tokenizer):
    model = make_model()
    (tmp_path / "mine").mkdir()
    export(
        model.named_parameters(), model.config, tokenizer.save_pretrained, tmp_path / "mine", torch.float32
    )
    with pytest.raises(CheckpointError, match="not empty"):
        export(
            model.named_parameters(),
            model.config,
            tokenizer.save_pretrained,
            tmp_path / "mine",
            torch.float32,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_full_disk_leaves_nothing(small_disk, tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**SIZES, "vocab_size": 20_000}))
    with pytest.raises(CheckpointError, match="disk is full"):
        export(
            model.named_parameters(),
            model.config,
            tokenizer.save_pretrained,
            small_disk / "out",
            torch.float32,
        )
    assert list(small_disk.iterdir()) == []
