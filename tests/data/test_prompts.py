import copy
import json
import random

import pytest
import torch

from tandem.data.forms import PromptForm
from tandem.data.tokens import tokenize
from tandem.rewards.signatures import VERLS, Reads
from tests.data.cases import chatml, prompt_row, talk, text_row


def columns_of(batch):
    return {name: list(column) for name, column in batch.non_tensor_batch.items()}


def test_batch_holds_what_the_file_holds(prompts):
    system = [{"role": "system", "content": "be brief"}, *talk("1+1=")]
    rows = [prompt_row("3+4=", "7", index=5), prompt_row(system, "2", source="gsm8k"), prompt_row("0", "0")]
    dataset = prompts(rows)
    batch = dataset.batch([2, 0, 0, 1], uid_prefix="3")
    assert batch.ragged("prompts").dtype == torch.int64
    texts = prompts.texts(batch.ragged("prompts"))
    assert texts[:3] == [chatml("0"), chatml("3+4="), chatml("3+4=")]
    assert texts[3] == "<|im_start|>system\nbe brief<|im_end|>\n" + chatml("1+1=")
    assert batch.ragged("prompts").row(0).tolist() == prompts.tokenizer.apply_chat_template(
        rows[2]["prompt"], add_generation_prompt=True, return_dict=False
    )
    columns = columns_of(batch)
    assert columns["uid"] == ["3-2", "3-0", "3-0", "3-1"] and columns["index"] == [2, 0, 0, 1]
    assert columns["data_source"] == ["arithmetic", "arithmetic", "arithmetic", "gsm8k"]
    assert columns["ground_truth"] == ["0", "7", "7", "2"] and columns["messages"][3] == system
    assert columns["extra_info"][1] == {"split": "train", "index": 5}
    assert dataset.data_sources == ("arithmetic", "gsm8k")


def test_several_files_of_several_formats_and_shapes(prompts):
    first = prompts.files.parquet([prompt_row("a", index=1), prompt_row("b")], "a.parquet")
    row = prompt_row([{"content": "c", "role": "user"}], "9")  # the fields have another order
    del row["extra_info"]
    second = prompts.files.parquet([row], "b.parquet")
    third = prompts.files.text("\n".join(json.dumps(prompt_row(x, level=3)) for x in "de"), "c.jsonl")
    batch = prompts([first, second, third]).batch(range(5), uid_prefix="val")
    assert prompts.texts(batch.ragged("prompts")) == [chatml(text) for text in "abcde"]
    columns = columns_of(batch)
    assert columns["index"] == [0, 1, 2, 3, 4] and columns["ground_truth"][2] == "9"
    assert columns["extra_info"][2] == {} and columns["extra_info"][4]["level"] == 3


def test_functions_of_either_form_get_what_they_read(prompts):
    rows = [prompt_row("x")]
    assert "columns" not in prompts(rows).batch([0], uid_prefix="e").non_tensor_batch
    both = VERLS + Reads(("prompt",), ())
    dataset = prompts(rows, form=PromptForm(needs=both.needs), optional=both.optional)
    (columns,) = dataset.batch([0], uid_prefix="e").non_tensor_batch["columns"]
    assert columns["prompt"][0]["content"] == "x" and columns["reward_model"]["ground_truth"]


def test_text_needs_no_template(prompts):
    prompts.tokenizer.chat_template = None
    texts = ["12+7=", "<|im_start|>héé\n"]
    dataset = prompts([text_row(text) for text in texts])
    assert prompts.texts(dataset.tokens) == texts
    assert dataset.tokens.row(1)[0] == prompts.tokenizer.convert_tokens_to_ids("<|im_start|>")
    messages = dataset.batch([0], uid_prefix="0").non_tensor_batch["messages"]
    assert list(messages) == [[{"role": "", "content": "12+7="}]]


def test_other_column_names_and_template_options(prompts):
    row = prompt_row("a")
    rows = [{"q": row["prompt"], "from": "s", "reward_model": row["reward_model"]}]
    form = PromptForm(prompt_key="q", reward_fn_key="from")
    dataset = prompts(rows, form=form, chat_template_kwargs={"think": True})
    assert prompts.texts(dataset.tokens) == [chatml("a") + "<think>"] and dataset.data_sources == ("s",)


def test_template_sees_no_null_fields(prompts):
    prompts.tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    named = [{"role": "user", "content": "x", "name": "Ann"}]
    dataset = prompts([prompt_row(named), prompt_row("y")])
    assert prompts.texts(dataset.tokens) == ["['role', 'content', 'name']", "['role', 'content']"]
    assert dataset.batch([1], uid_prefix="0").non_tensor_batch["messages"][0] == talk("y")


def test_max_samples_keeps_the_first(prompts):
    paths = [prompts.files.parquet([prompt_row(c) for c in text], f"{text}.parquet") for text in ("ab", "cd")]
    assert prompts.texts(prompts(paths, max_samples=3).tokens) == [chatml(c) for c in "abc"]
    for count in (0, -2):
        error = prompts.refused(paths, max_samples=count)
        assert (error.field, error.got) == ("max_samples", count)


@pytest.mark.parametrize(("truncation", "kept"), [("left", "45678"), ("right", "12345"), ("middle", "12678")])
def test_truncation_cuts_tokens(prompts, truncation, kept):
    rows = [text_row(text) for text in ("a b", "12345678", "12345")]
    dataset = prompts(rows, max_prompt_length=5, truncation=truncation)
    assert prompts.texts(dataset.tokens) == ["a b", kept, "12345"] and dataset.dropped == 0


def test_long_rows_are_named_with_their_lengths_or_dropped_and_counted(prompts):
    error = prompts.refused([text_row("x" * length) for length in (3, 9, 5, 6)], max_prompt_length=5)
    assert error.field == "data.max_prompt_length" and "2 row(s) of 4" in error.message
    assert "row 1: 9 tokens\n" in str(error) and "row 3: 6 tokens\n" in str(error)
    assert "at most 5 tokens; the longest has 9" in str(error.expected)
    assert "data.filter_overlong_prompts=True" in str(error.remedy)
    limits = {"max_prompt_length": 5, "filter_overlong_prompts": True}
    dataset = prompts([text_row("x" * n, str(n)) for n in (6, 2, 7, 5)], **limits)
    assert (len(dataset), dataset.dropped) == (2, 2)
    batch = dataset.batch([1, 0], uid_prefix="0")
    assert batch.ragged("prompts").lengths.tolist() == [5, 2]
    columns = columns_of(batch)
    assert columns["ground_truth"] == ["5", "2"] and columns["uid"] == ["0-3", "0-1"]
    error = prompts.refused([text_row("x" * n) for n in (6, 8)], **limits)
    assert error.field == "data.filter_overlong_prompts"
    assert "prompts of 6 to 8 tokens" in str(error.got) and "(now 5)" in str(error.remedy)


def test_a_wrong_choice_of_truncation_and_files_that_are_not_there(prompts):
    absent = str(prompts.files.folder / "absent.parquet")
    assert prompts.refused(absent, truncation="middel").got == "middel"
    good = prompts.files.parquet([prompt_row("a")])
    assert prompts.refused([good, absent]).field == absent
    folder = str(prompts.files.folder)
    assert prompts.refused(folder).field == folder and "no data file is named" in str(prompts.refused([]))


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
CONTENT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_templates_that_are_missing_refuse_a_row_or_are_broken(prompts):
    """A broken template is named, and not the rows."""
    prompts.tokenizer.chat_template = None
    error = prompts.refused([prompt_row("a")])
    assert "no chat template" in error.message and prompts.tokenizer.name_or_path in str(error)
    assert "actor_rollout_ref.model.custom_chat_template=" in str(error.remedy)
    prompts.tokenizer.chat_template = REFUSES + CONTENT
    error = prompts.refused([prompt_row("a"), prompt_row([{"role": "system", "content": "x"}])])
    assert "1 row(s)" in error.message and "row 1: no system role" in str(error.got)
    prompts.tokenizer.chat_template = CONTENT
    error = prompts.refused([prompt_row("a"), prompt_row("")])
    assert "1 row(s)" in error.message and "row 1: no tokens" in str(error.got)
    for broken in ("{% for m in messages %}{{ m.content }}", "{{ messages[0].nothing.more }}"):
        prompts.tokenizer.chat_template = broken
        error = prompts.refused([prompt_row("x")] * 3)
        assert error.field == "tokenizer.chat_template"
        assert "row 0" not in str(error) and "custom_chat_template=" in str(error)


def test_ten_rows_are_named_with_their_files_and_the_rest_counted(prompts):
    good = prompts.files.parquet([prompt_row("a")] * 2000, "good.parquet")
    rows = [prompt_row("a"), *[prompt_row("b", None)] * 12, prompt_row("c")]
    text = str(prompts.refused([good, prompts.files.parquet(rows, "bad.parquet")]))
    assert "12 row(s) of the wrong shape" in text and "and 2 more" in text
    assert [f"bad.parquet row {row}: " in text for row in (0, 1, 10, 11)] == [False, True, True, False]


def test_many_rows_are_stored_flat(prompts):
    dataset = prompts([text_row("x" * (1 + n % 7)) for n in range(5000)])
    assert dataset.tokens.dtype == torch.int32
    assert dataset.tokens.lengths.tolist() == [1 + n % 7 for n in range(5000)]


def test_rows_that_hold_images_are_refused_and_empty_ones_are_not(prompts):
    rows = [prompt_row("1+1=", "2") | {"images": images} for images in ([], None, ["cat.png"])]
    form = PromptForm(media_keys=("images", "videos"))
    assert len(prompts(rows[:2], form=form)) == 2 and len(prompts(rows)) == 3
    assert "row 2: images" in str(prompts.refused(rows, form=form))


@pytest.mark.parametrize("split_special", [False, True])
def test_texts_are_tokenised_as_the_tokenizer_does_in_a_call(tokenizer, split_special):
    draw = random.Random(repr(split_special))
    tokenizer.split_special_tokens = split_special
    pieces = [*tokenizer.all_special_tokens, "ä", "\U0001f600", "\n\n", "  ", "the", "\u202e", "9", "\x00"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 40))) for _ in range(200)]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert [ids.tolist() for ids in tokenize(tokenizer, texts)] == expected


def test_a_tokenizer_with_a_call_of_its_own_is_called(tokenizer):
    class Shouting(type(tokenizer)):
        def __call__(self, text, **options):
            return super().__call__([each.upper() for each in text], **options)

    own = copy.deepcopy(tokenizer)
    own.__class__ = Shouting
    assert tokenize(own, ["abc"])[0].tolist() == tokenize(tokenizer, ["ABC"])[0].tolist()
