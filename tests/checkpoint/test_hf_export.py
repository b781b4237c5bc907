import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer
from transformers.utils import logging

from tandem.checkpoint.hf_export import export
from tandem.errors import CheckpointError

SIZES = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


def make_model(kind="qwen2", **changes):
    torch.manual_seed(3)
    config = CONFIG_MAPPING[kind](**SIZES | {"eos_token_id": 7} | changes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def exported():
    """Return a function that exports weights, by default the model's own in fp32, with a tokenizer."""
    characters = {chr(ord("A") + i): i for i in range(50)}
    tokenizer = Qwen2Tokenizer(vocab=characters, merges=[], unk_token="A", eos_token="H", pad_token="B")

    def run(model, out, weights=None, dtype=torch.float32, **options):
        weights = dict(model.named_parameters()) if weights is None else weights
        weights = weights.items() if isinstance(weights, dict) else weights
        return export(weights, model.config, tokenizer.save_pretrained, out, dtype, **options)

    return run


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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 12_000])
def test_transformers_loads_identical_logits(tmp_path, exported, kind, tied, max_shard_bytes, capsys):
    model = make_model(kind, tie_word_embeddings=tied)
    logging.enable_progress_bar()
    out = exported(model, tmp_path / "out", reused_buffer(model), max_shard_bytes=max_shard_bytes)
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
        assert len(shards) > 3 and all(shard.stat().st_size < 12_000 + 4096 for shard in shards)
    assert not list(tmp_path.glob("*.tmp"))


def test_both_names_of_a_tied_weight(tmp_path, exported):
    model = make_model(tie_word_embeddings=True)
    weights = dict(model.named_parameters(remove_duplicate=False))
    only_head = {name: w for name, w in weights.items() if name != "model.embed_tokens.weight"}
    for given in (weights, only_head):
        out = exported(model, tmp_path / str(len(given)), given)
        assert "lm_head.weight" in given
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))
    weights["lm_head.weight"] = weights["lm_head.weight"].detach() + 1e-3
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        exported(model, tmp_path / "different", weights)
    assert not (tmp_path / "different").exists()


def test_dtype_is_that_of_the_files_and_the_config(tmp_path, exported):
    model = make_model()
    before = model.config.to_dict()
    out = exported(model, tmp_path / "bf16", dtype=torch.bfloat16)
    loaded, config = AutoModelForCausalLM.from_pretrained(out), json.loads((out / "config.json").read_text())
    assert (loaded.dtype, config["dtype"]) == (torch.bfloat16, "bfloat16")
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert model.config.to_dict() == before


def test_weights_that_do_not_fit(tmp_path, exported):
    model, norm = make_model(), "model.norm.weight"
    weights = dict(model.named_parameters())
    wrong = {
        "missing": {name: w for name, w in weights.items() if name != norm},
        r"model\.extra": {**weights, "model.extra": torch.zeros(1)},
        r"torch\.Size\(\[31\]\)": {**weights, norm: torch.zeros(31)},
    }
    for telling, bad in wrong.items():
        with pytest.raises(CheckpointError, match=telling):
            exported(model, tmp_path / "out", bad)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_and_an_empty_one_is_taken(tmp_path, exported):
    model, mine = make_model(), tmp_path / "mine"
    mine.mkdir()
    exported(model, mine)
    with pytest.raises(CheckpointError, match="not empty"):
        exported(model, mine)
    assert list(tmp_path.iterdir()) == [mine]


def test_full_disk_leaves_nothing(small_disk, exported):
    with pytest.raises(CheckpointError, match="disk is full"):
        exported(make_model(vocab_size=20_000), small_disk / "out")
    assert list(small_disk.iterdir()) == []
