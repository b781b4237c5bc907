import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tandem.errors import ModelError
from tandem.models.loading import load_config, load_policy, load_tokenizer


@pytest.fixture
def folder(qwen2_folder, tmp_path):
    return shutil.copytree(qwen2_folder, tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_arrive_unchanged_in_the_asked_type(folder):
    stored = load_file(folder / "model.safetensors")
    model = load_policy(folder, dtype=torch.float64)
    assert model.training and model.config._attn_implementation == "tandem_packed"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, stored[name].double()), name


def test_dropout_is_switched_off(folder):
    edit_config(folder, attention_dropout=0.3)
    assert load_config(folder).attention_dropout == 0.0
    assert load_policy(folder).model.layers[0].self_attn.attention_dropout == 0.0


def test_no_folder(tmp_path):
    with pytest.raises(ModelError, match="does not exist") as caught:
        load_policy(tmp_path / "absent")
    assert caught.value.field == "model.path"


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)


def test_broken_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        load_policy(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="contains no weights"):
        load_policy(folder)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match="weights cannot be loaded"):
        load_policy(folder)


def test_one_weight_missing(folder):
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(folder)


def test_one_weight_of_another_shape(folder):
    edit_config(folder, intermediate_size=64)
    with pytest.raises(ModelError, match=r"mlp\.\w+\.weight is \d+ × \d+, but config\.json asks for"):
        load_policy(folder)


def test_a_head_we_cannot_compute(folder):
    edit_config(folder, logits_scaling=8.0)
    with pytest.raises(ModelError, match="logits_scaling"):
        load_policy(folder)


def test_tokenizer(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, custom_chat_template="{{ messages[0].content }}!")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert rendered == "a!"


def test_tokenizer_missing(folder):
    with pytest.raises(ModelError, match="contains no tokenizer"):
        load_tokenizer(folder)


def test_tokenizer_without_eos(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="end-of-sequence"):
        load_tokenizer(tmp_path)
