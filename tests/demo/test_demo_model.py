import string

import pytest
import torch

from tandem.demo.model import build_model, build_tokenizer, write_model
from tandem.models.loading import load_policy, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "model"
    write_model(path, seed=5)
    return path


def test_one_token_per_character_and_back(folder):
    tokenizer = load_tokenizer(folder)
    text = string.printable
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("naïve = 3 €").input_ids) == "naïve = 3 €"
    assert len(tokenizer) == 258
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer("9<|endoftext|>").input_ids[-1] == tokenizer.eos_token_id


def test_chat_template_is_the_contents(folder):
    tokenizer = load_tokenizer(folder)
    question = [{"role": "user", "content": "37+65?"}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert asked == "37+65?"
    answered = [*question, {"role": "assistant", "content": "12,10=102"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == "37+65?12,10=102<|endoftext|>"


def test_model_is_a_small_qwen2_fixed_by_its_seed(folder):
    saved = load_policy(folder)
    assert saved.config.model_type == "qwen2"
    assert saved.config.vocab_size == 258
    assert saved.config.eos_token_id == load_tokenizer(folder).eos_token_id
    assert 1_000_000 <= sum(weight.numel() for weight in saved.parameters()) <= 4_000_000
    torch.manual_seed(99)
    before = torch.get_rng_state()
    same = build_model(build_tokenizer(), seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    other = build_model(build_tokenizer(), seed=6).state_dict()
    for name, weight in saved.state_dict().items():
        torch.testing.assert_close(weight, same[name], rtol=0, atol=0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(same[name], other[name])
    assert same[name].std().item() == pytest.approx(128**-0.5, rel=0.02)
