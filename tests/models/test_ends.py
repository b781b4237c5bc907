"""End tokens from all files of a model's folder, and how transformers uses an export."""

import json

import pytest
from transformers import AutoModelForCausalLM

from tandem.errors import ModelError
from tandem.models.ends import stop_token_ids
from tandem.models.loading import load_tokenizer
from tests.support.tiny import CHARACTERS, make_model

EOS = 1


def template(each="", last="", first=""):
    """Return a chat template with a text before each turn, after each but the last, and after the last."""
    turn = "FIRST{{ m['role'][0] }} {{ m['content'] }}{% if not loop.last %}EACH{% endif %}"
    text = "{% for m in messages %}" + turn + "{% endfor %}LAST"
    return text.replace("EACH", each).replace("LAST", last).replace("FIRST", first)


def folder_of(path, config, generation, chat, **text):
    make_model(path, vocab_size=3 + len(CHARACTERS) + 3)
    tokenizer = load_tokenizer(path, custom_chat_template=chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<other>", "<user>"]})
    tokenizer.save_pretrained(path)
    stored = json.loads((path / "config.json").read_text()) | {"eos_token_id": config} | text
    (path / "config.json").write_text(json.dumps(stored))
    (path / "generation_config.json").unlink()
    if generation is not ...:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "top_p": 0.9}))
    return path


TURN_ID, OTHER_ID, USER_ID = (3 + len(CHARACTERS) + place for place in range(3))

FOLDERS = {
    "the tokenizer alone": (None, ..., template(), {EOS}),
    "config.json": (7, ..., template(), {EOS, 7}),
    "a list in config.json": ([7, 9], ..., template(), {EOS, 7, 9}),
    "generation_config.json": (7, 9, template(), {EOS, 9}),
    "a list in generation_config.json": (7, [8, 9], template(), {EOS, 8, 9}),
    "none in generation_config.json": (7, None, template(), {EOS, 7}),
    "the template": (None, ..., template("<turn>", "<turn>"), {EOS, TURN_ID}),
    "the template, after a blank": (EOS, EOS, template("<turn>\\n", " <turn>\\n"), {EOS, TURN_ID}),
    "the template's last turn ends otherwise": (EOS, EOS, template("<other>", "<turn>"), {EOS, TURN_ID}),
    "the next turn's marker": (EOS, EOS, template(first="<user>"), {EOS, USER_ID}),
    "two tokens, of which the second ends": (TURN_ID, ..., template("", "<other><turn>"), {EOS, TURN_ID}),
    "a template that ends in no token": (EOS, EOS, template("x", "x", "<user>"), {EOS}),
    "a template that fails": (EOS, EOS, "{{ raise_exception('no') }}", {EOS}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_all_are_found(tmp_path, name):
    config, generation, chat, wanted = FOLDERS[name]
    folder = folder_of(tmp_path / "model", config, generation, chat)
    assert set(stop_token_ids(folder, load_tokenizer(folder))) == wanted
    declared = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    assert ({declared} if isinstance(declared, int) else {*(declared or ())}) <= wanted


def test_those_of_the_part_for_text(tmp_path):
    folder = folder_of(tmp_path / "model", None, ..., template(), text_config={"eos_token_id": [5]})
    assert stop_token_ids(folder, load_tokenizer(folder)) == (EOS, 5)


@pytest.mark.parametrize("bad", ["<eos>", -1, [1, "2"], 1.5, True])
def test_what_is_no_token_is_refused(tmp_path, bad):
    folder = folder_of(tmp_path / "model", EOS, bad, template())
    with pytest.raises(ModelError, match="not a token id"):
        stop_token_ids(folder, load_tokenizer(folder))
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        stop_token_ids(folder, load_tokenizer(folder))
