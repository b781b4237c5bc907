"""Folders of models, reward models and tokenizers: what is loaded, and what is refused."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from tandem.errors import EngineError, ModelError
from tandem.models.decoders import decoder_name, decoder_of, layers_of
from tandem.models.loading import load_config, load_policy, load_scorer, load_tokenizer, require_trainable
from tandem.models.packing import pack
from tandem.models.score import ScoreModel
from tandem.models.small_copy import small_copy
from tandem.models.vocabulary import check_vocabulary, tokenizer_of_scorer
from tandem.protocol import Ragged
from tests.models.small import CPU, SHAPE, make_engine, save
from tests.support.tiny import CHARACTERS, make_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def scorer(tmp_path):
    return save(Qwen3Config(**SHAPE, num_labels=1), tmp_path / "scorer", scorer=True)


def edit(folder, file="config.json", **changes):
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))


def without(name, folder):
    stored = load_file(folder / WEIGHTS)
    del stored[name]
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def test_weights_arrive_unchanged_in_the_asked_type(folder):
    stored, model = load_file(folder / WEIGHTS), load_policy(folder, dtype=torch.float64)
    assert model.training and model.config._attn_implementation == "tandem_packed"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter, stored[name].double()), name


def test_dropout_is_switched_off(folder):
    edit(folder, attention_dropout=0.3)
    assert load_config(folder).attention_dropout == 0.0
    assert load_policy(folder).model.layers[0].self_attn.attention_dropout == 0.0


TROUBLE = [
    ("does not exist", shutil.rmtree),
    (r"config\.json", lambda folder: (folder / "config.json").unlink()),
    (r"config\.json cannot be used", lambda folder: (folder / "config.json").write_text("{")),
    ("contains no weights", lambda folder: (folder / WEIGHTS).unlink()),
    ("cannot be loaded", lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])),
    (
        "cannot be loaded",
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:200]),
    ),
    (r"model\.layers\.1\.mlp\.up_proj\.weight", partial(without, "model.layers.1.mlp.up_proj.weight")),
    (r"model\.embed_tokens\.weight|lm_head\.weight", partial(without, "model.embed_tokens.weight")),
    (r"mlp\.\w+\.weight is \d+ × \d+", lambda folder: edit(folder, intermediate_size=64)),
]


@pytest.mark.parametrize(("telling", "damage"), TROUBLE)
def test_what_cannot_be_loaded_is_named(folder, telling, damage):
    damage(folder)
    for load in (load_policy, make_engine):
        with pytest.raises(ModelError, match=telling) as caught:
            load(folder)
        assert caught.value.field == "model.path"


@pytest.mark.parametrize(
    ("telling", "damage"),
    [
        ("no list of layers", lambda model: setattr(model.model, "layers", nn.Identity())),
        ("not one linear layer", lambda model: setattr(model, "lm_head", nn.Identity())),
    ],
)
def test_structures_that_cannot_be_trained(folder, telling, damage):
    model = load_policy(folder)
    damage(model)
    with pytest.raises(ModelError, match=telling):
        require_trainable(model)


DECODERS = {"llama4_text": "model", "opt": "model.decoder", "gemma3": "model.language_model"}


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_and_layers_under_other_names(kind):
    config = small_copy(CONFIG_MAPPING[kind]())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder_name(model) == DECODERS[kind]
    assert len(layers_of(decoder_of(model))) == config.get_text_config().num_hidden_layers


def test_a_scorers_weights_arrive_unchanged_with_the_trained_head(scorer):
    stored = load_file(scorer / WEIGHTS)
    model = ScoreModel(load_scorer(scorer, dtype=torch.float64))
    found = {model.hf_name(name): p for name, p in model.named_parameters()}
    assert set(found) == set(stored) and "score.weight" in found
    assert all(torch.equal(found[name], value.double()) for name, value in stored.items())
    assert not model.model.training
    with pytest.raises(EngineError, match="a score model"):
        model(pack(Ragged.from_list([[1, 2]]), None, device=CPU, whole=True), frozenset({"values"}))


def test_folders_that_are_no_reward_model(folder, tmp_path):
    bert = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    labels = save(Qwen3Config(**SHAPE, num_labels=3), tmp_path / "labels", scorer=True)
    other = save(BertConfig(**bert, num_labels=1), tmp_path / "bert", scorer=True)
    unsaved = shutil.copytree(folder, tmp_path / "unsaved")  # the head was never saved
    edit(unsaved, architectures=["Qwen2ForSequenceClassification"], id2label={"0": "LABEL_0"})
    for path, got, options in (
        *((folder, "Qwen2ForCausalLM", {}), (labels, "num_labels 3", {})),
        *((other, "Bert", {"attention": "sdpa"}), (unsaved, "score.weight", {})),
    ):
        with pytest.raises(ModelError) as caught:
            load_scorer(path, **options)
        assert got in caught.value.got


def words(folder, vocabulary, **special):
    LlamaConfig().save_pretrained(folder)
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)
    return folder


def test_tokenizers(folder, tmp_path):
    own = words(tmp_path / "own", {"<eos>": 0, "a": 1, "<unk>": 2}, eos_token="<eos>")
    tokenizer = load_tokenizer(own, custom_chat_template="{{ messages[0].content }}!")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    endless = words(tmp_path / "endless", {"a": 0, "<unk>": 1})
    for path, telling in ((folder, "no tokenizer"), (endless, "end-of-sequence")):
        with pytest.raises(ModelError, match=telling):
            load_tokenizer(path)


def test_vocabularies(tmp_path):
    policy, bare = tmp_path / "policy", tmp_path / "bare"
    tokenizer, names = make_tokenizer(policy), {"field": "ref.path"}
    bare.mkdir()
    check_vocabulary(bare, len(tokenizer), tokenizer, **names)
    check_vocabulary(policy, 100, tokenizer, **names)
    assert tokenizer_of_scorer(bare, tokenizer) is tokenizer_of_scorer(policy, tokenizer) is None
    own = tokenizer_of_scorer(bare, tokenizer, chat_template="{{ messages }}")
    assert own.chat_template == "{{ messages }}" != tokenizer.chat_template
    with pytest.raises(ModelError) as caught:
        check_vocabulary(bare, len(tokenizer) - 1, tokenizer, **names)
    assert caught.value.expected == f">= {len(CHARACTERS) + 3}"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, bare)
    model = json.loads((bare / "tokenizer.json").read_text())["model"]
    model["vocab"]["3"], model["vocab"]["4"] = model["vocab"]["4"], model["vocab"]["3"]
    edit(bare, "tokenizer.json", model=model)
    with pytest.raises(ModelError) as caught:
        check_vocabulary(bare, 100, tokenizer, **names)
    assert "2 tokens with other ids, such as '3'" in caught.value.got
    assert tokenizer_of_scorer(bare, tokenizer).encode("3") == tokenizer.encode("4")
