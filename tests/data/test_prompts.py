"""PromptDataset: the result for good rows, and the error for every kind of bad input."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tandem.data.forms import PromptForm
from tandem.data.prompts import PromptDataset
from tandem.data.tokens import tokenize
from tandem.errors import DataError
from tandem.rewards.signatures import VERLS, Reads

Row = Callable[..., dict[str, Any]]


def chatml(*contents: str) -> str:
    turns = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    return turns + "<|im_start|>assistant\n"


def raised(*args: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        PromptDataset(*args, **options)
    return str(caught.value)


def test_batch_holds_what_the_file_holds(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    rows = [prompt_row("3+4=", "7", index=5), prompt_row(system, "2", source="gsm8k"), prompt_row("0", "0")]
    dataset = PromptDataset(files.parquet(rows), tokenizer)
    batch = dataset.batch([2, 0, 0, 1], uid_prefix="3")
    assert batch.ragged("prompts").dtype == torch.int64
    texts = [tokenizer.decode(ids) for ids in batch.ragged("prompts").unbind()]
    assert texts[:3] == [chatml("0"), chatml("3+4="), chatml("3+4=")]
    assert texts[3] == "<|im_start|>system\nbe brief<|im_end|>\n" + chatml("1+1=")
    assert batch.ragged("prompts").row(0).tolist() == tokenizer.apply_chat_template(
        rows[2]["prompt"], add_generation_prompt=True, return_dict=False
    )
    columns = {name: list(column) for name, column in batch.non_tensor_batch.items()}
    assert columns["uid"] == ["3-2", "3-0", "3-0", "3-1"]
    assert columns["index"] == [2, 0, 0, 1]
    assert columns["data_source"] == ["arithmetic", "arithmetic", "arithmetic", "gsm8k"]
    assert columns["ground_truth"] == ["0", "7", "7", "2"]
    assert columns["messages"][3] == system
    assert columns["extra_info"][1] == {"split": "train", "index": 5}
    assert dataset.data_sources == ("arithmetic", "gsm8k")


def test_several_files_of_several_formats_and_shapes(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    first = files.parquet([prompt_row("a", index=1), prompt_row("b")], "a.parquet")
    row = prompt_row("c", "9")
    del row["extra_info"]
    row["prompt"] = [{"content": "c", "role": "user"}]  # the fields have another order
    second = files.parquet([row], "b.parquet")
    third = files.text("\n".join(json.dumps(prompt_row(text, level=3)) for text in "de"), "c.jsonl")
    dataset = PromptDataset([first, second, third], tokenizer)
    batch = dataset.batch(range(5), uid_prefix="val")
    texts = [tokenizer.decode(ids) for ids in batch.ragged("prompts").unbind()]
    assert texts == [chatml(text) for text in "abcde"]
    assert list(batch.non_tensor_batch["index"]) == [0, 1, 2, 3, 4]
    assert batch.non_tensor_batch["ground_truth"][2] == "9"
    assert batch.non_tensor_batch["extra_info"][2] == {}
    assert batch.non_tensor_batch["extra_info"][4]["level"] == 3


def test_functions_of_either_form_get_what_they_read(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    path = files.parquet([prompt_row("x")])
    plain = PromptDataset(path, tokenizer).batch([0], uid_prefix="e")
    assert "columns" not in plain.non_tensor_batch
    both = VERLS + Reads(("prompt",), ())
    dataset = PromptDataset(path, tokenizer, form=PromptForm(needs=both.needs), optional=both.optional)
    (columns,) = dataset.batch([0], uid_prefix="e").non_tensor_batch["columns"]
    assert columns["prompt"][0]["content"] == "x" and columns["reward_model"]["ground_truth"]


def test_text_needs_no_template(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    tokenizer.chat_template = None
    rows = [{**prompt_row("x"), "prompt": text} for text in ("12+7=", "<|im_start|>héé\n")]
    dataset = PromptDataset(files.parquet(rows), tokenizer)
    assert [tokenizer.decode(ids) for ids in dataset.tokens.unbind()] == ["12+7=", "<|im_start|>héé\n"]
    assert dataset.tokens.row(1)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    messages = dataset.batch([0], uid_prefix="0").non_tensor_batch["messages"]
    assert list(messages) == [[{"role": "", "content": "12+7="}]]


def test_other_column_names_and_template_options(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    row = prompt_row("a", source="s")
    path = files.parquet([{"q": row["prompt"], "from": "s", "reward_model": row["reward_model"]}])
    dataset = PromptDataset(
        path,
        tokenizer,
        form=PromptForm(prompt_key="q", reward_fn_key="from"),
        chat_template_kwargs={"think": True},
    )
    assert tokenizer.decode(dataset.tokens.row(0)) == chatml("a") + "<think>"
    assert dataset.data_sources == ("s",)


def test_template_sees_no_null_fields(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    named = [{"role": "user", "content": "x", "name": "Ann"}]
    dataset = PromptDataset(files.parquet([prompt_row(named), prompt_row("y")]), tokenizer)
    texts = [tokenizer.decode(ids) for ids in dataset.tokens.unbind()]
    assert texts == ["['role', 'content', 'name']", "['role', 'content']"]
    assert dataset.batch([1], uid_prefix="0").non_tensor_batch["messages"][0] == [
        {"role": "user", "content": "y"}
    ]


def test_max_samples_keeps_the_first(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    paths = [files.parquet([prompt_row(c) for c in text], f"{text}.parquet") for text in ("ab", "cd")]
    dataset = PromptDataset(paths, tokenizer, max_samples=3)
    assert [tokenizer.decode(ids) for ids in dataset.tokens.unbind()] == [chatml(c) for c in "abc"]


@pytest.mark.parametrize("count", [0, -2])
def test_max_samples_out_of_range(files: Any, tokenizer: Any, prompt_row: Row, count: int) -> None:
    text = raised(files.parquet([prompt_row("a")]), tokenizer, max_samples=count)
    assert text.startswith(f"max_samples: out of range\n  got:      {count}\n")


@pytest.mark.parametrize(("truncation", "kept"), [("left", "45678"), ("right", "12345"), ("middle", "12678")])
def test_truncation_cuts_tokens(
    files: Any, tokenizer: Any, prompt_row: Row, truncation: str, kept: str
) -> None:
    rows = [{**prompt_row(""), "prompt": text} for text in ("a b", "12345678", "12345")]
    dataset = PromptDataset(files.parquet(rows), tokenizer, max_prompt_length=5, truncation=truncation)
    texts = [tokenizer.decode(ids) for ids in dataset.tokens.unbind()]
    assert texts == ["a b", kept, "12345"]
    assert dataset.dropped == 0


def test_truncation_error_names_rows_and_lengths(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    rows = [{**prompt_row(""), "prompt": "x" * length} for length in (3, 9, 5, 6)]
    text = raised(files.parquet(rows), tokenizer, max_prompt_length=5)
    assert text.startswith("data.max_prompt_length: 2 row(s) of 4 are over the length limit")
    assert "row 1: 9 tokens\n" in text
    assert "row 3: 6 tokens\n" in text
    assert "at most 5 tokens; the longest has 9" in text
    assert "data.filter_overlong_prompts=True" in text


def test_filter_drops_counts_and_keeps_row_numbers(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    rows = [{**prompt_row("", str(n)), "prompt": "x" * n} for n in (6, 2, 7, 5)]
    dataset = PromptDataset(files.parquet(rows), tokenizer, max_prompt_length=5, filter_overlong_prompts=True)
    assert (len(dataset), dataset.dropped) == (2, 2)
    batch = dataset.batch([1, 0], uid_prefix="0")
    assert batch.ragged("prompts").lengths.tolist() == [5, 2]
    assert list(batch.non_tensor_batch["ground_truth"]) == ["5", "2"]
    assert list(batch.non_tensor_batch["uid"]) == ["0-3", "0-1"]


def test_all_filtered_out(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    rows = [{**prompt_row(""), "prompt": "x" * n} for n in (6, 8)]
    path = files.parquet(rows)
    text = raised(path, tokenizer, max_prompt_length=5, filter_overlong_prompts=True)
    assert text == (
        "data.filter_overlong_prompts: all 2 prompts are over the length limit and were filtered out\n"
        f"  got:      prompts of 6 to 8 tokens in {path}\n"
        "  expected: at least one of at most 5 tokens\n"
        "  remedy:   raise data.max_prompt_length (now 5)"
    )


def test_unknown_truncation(files: Any, tokenizer: Any) -> None:
    assert "got:      middel\n" in raised("absent.parquet", tokenizer, truncation="middel")


def test_template_missing(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    tokenizer.chat_template = None
    text = raised(files.parquet([prompt_row("a")]), tokenizer)
    assert "the tokenizer has no chat template" in text
    assert tokenizer.name_or_path in text
    assert "actor_rollout_ref.model.custom_chat_template=" in text


def test_template_that_refuses_names_the_row(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    system = [{"role": "system", "content": "x"}]
    text = raised(files.parquet([prompt_row("a"), prompt_row(system)]), tokenizer)
    assert "1 row(s) that the tokenizer's chat template cannot format" in text
    assert "got:      row 1: no system role\n" in text


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }}", "{{ messages[0].nothing.more }}"]
)
def test_a_broken_template_is_named_and_not_the_rows(
    files: Any, tokenizer: Any, prompt_row: Row, template: str
) -> None:
    tokenizer.chat_template = template
    conversation = [{"role": "user", "content": "x"}]
    text = raised(files.parquet([prompt_row(conversation)] * 3), tokenizer)
    assert text.startswith("tokenizer.chat_template: ")
    assert "row 0" not in text and "custom_chat_template=" in text


def test_prompt_without_tokens(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = raised(files.parquet([prompt_row("a"), prompt_row("")]), tokenizer)
    assert "1 row(s) whose prompt has no tokens" in text
    assert "row 1: no tokens" in text


def test_missing_file_and_folder(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    good = files.parquet([prompt_row("a")])
    absent = str(files.folder / "absent.parquet")
    assert raised([good, absent], tokenizer).startswith(f"{absent}: no such data file\n")
    assert raised(str(files.folder), tokenizer).startswith(f"{files.folder}: this is a folder\n")
    assert "no data file is named" in raised([], tokenizer)


@pytest.mark.parametrize("name", ["noise.parquet", "cut.parquet", "bad.jsonl"])
def test_unreadable_file(files: Any, tokenizer: Any, prompt_row: Row, name: str) -> None:
    whole = Path(files.parquet([prompt_row("a")], "whole.parquet")).read_bytes()
    content = {
        "noise.parquet": b"not parquet at all", "cut.parquet": whole[:-20], "bad.jsonl": b'{"prompt": [}',
    }  # fmt: skip
    path = files.text(content[name], name)
    kind = "JSON-lines" if name.endswith("jsonl") else "parquet"
    assert raised(path, tokenizer).startswith(f"{path}: not a readable {kind} file\n  got: ")


def test_damage_in_the_columns_themselves(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    path = files.parquet([prompt_row(f"question {n}") for n in range(50)])
    data = bytearray((files.folder / "train.parquet").read_bytes())
    data[4:200] = bytes(196)
    files.text(bytes(data), "train.parquet")
    assert raised(path, tokenizer).startswith(f"{path}: not a readable parquet file\n")


def test_missing_columns(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    row = prompt_row("a")
    del row["reward_model"], row["data_source"]
    text = raised(files.parquet([row]), tokenizer)
    assert "train.parquet: missing column 'data_source' and 'reward_model'\n" in text
    assert "got:      columns prompt, ability, extra_info\n" in text
    assert "expected: prompt, data_source, reward_model\n" in text


@pytest.mark.parametrize("name", ["empty.parquet", "empty.jsonl"])
def test_empty_file(files: Any, tokenizer: Any, prompt_row: Row, name: str) -> None:
    path = files.text("", name)
    assert raised([files.parquet([prompt_row("a")]), path], tokenizer).startswith(
        f"{path}: the data file is empty\n  got:      0 rows"
    )


def test_parquet_file_without_rows(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    path = files.folder / "none.parquet"
    pq.write_table(pa.Table.from_pylist([prompt_row("a")]).slice(0, 0), path)
    assert raised(str(path), tokenizer).startswith(f"{path}: the data file is empty\n")


def test_columns_of_different_types(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    paths = [files.parquet([prompt_row("a", truth)], f"{type(truth).__name__}.parquet") for truth in ("1", 1)]
    text = raised(paths, tokenizer)
    assert text.startswith(f"{paths[0]}, {paths[1]}: the files have different types in one column\n")
    assert "ground_truth has incompatible types: string vs int64" in text


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt: not a list of messages but null"),
    ({"prompt": []}, "prompt: an empty list of messages"),
    ({"prompt": [{"role": "user", "content": None}]}, "prompt: message 0: 'content' is null, not text"),
    ({"prompt": [{"role": None, "content": "x"}]}, "prompt: message 0: 'role' is null, not text"),
    ({"prompt": [None]}, "prompt: message 0 is not {role, content} but null"),
    ({"data_source": None}, "data_source is None, not a name"),
    ({"data_source": ""}, "data_source is '', not a name"),
    ({"reward_model": None}, "reward_model is null, not {style, ground_truth}"),
    ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model has no ground_truth"),
]


@pytest.mark.parametrize(("change", "problem"), BAD_ROWS)
def test_row_of_wrong_shape(
    files: Any, tokenizer: Any, prompt_row: Row, change: dict[str, Any], problem: str
) -> None:
    rows = [prompt_row("a"), prompt_row("b"), {**prompt_row("c"), **change}]
    text = raised(files.parquet(rows), tokenizer)
    assert "train.parquet: 1 row(s) of the wrong shape\n" in text
    assert f"got:      row 2: {problem}" in text
    assert "remedy:   fix or remove these rows" in text


WRONG_COLUMNS: list[tuple[str, Any, str]] = [
    ("prompt", 5, "not a list of messages but of type int"),
    ("prompt", ["text"], "message 0 is not {role, content} but of type str"),
    ("prompt", [{"from": "user", "content": "x"}], "message 0: 'role' is missing, not text"),
    ("prompt", [{"role": "user", "content": 3}], "message 0: 'content' is of type int, not text"),
    ("data_source", 5, "data_source is 5, not a name"),
    ("reward_model", "42", "reward_model is of type str, not {style, ground_truth}"),
    ("reward_model", {"style": "rule"}, "reward_model has no ground_truth"),
    ("extra_info", "x", "extra_info is of type str, not a mapping"),
]


@pytest.mark.parametrize(("column", "value", "problem"), WRONG_COLUMNS)
def test_column_of_wrong_type(
    files: Any, tokenizer: Any, prompt_row: Row, column: str, value: Any, problem: str
) -> None:
    text = raised(files.parquet([{**prompt_row("a"), column: value}] * 2), tokenizer)
    assert "2 row(s) of the wrong shape" in text
    assert text.count(problem) == 2


def test_ten_rows_are_named_with_their_files_and_the_rest_counted(
    files: Any, tokenizer: Any, prompt_row: Row
) -> None:
    good = files.parquet([prompt_row("a")] * 2000, "good.parquet")
    bad = files.parquet([prompt_row("a"), *[prompt_row("b", None)] * 12, prompt_row("c")], "bad.parquet")
    text = raised([good, bad], tokenizer)
    assert "12 row(s) of the wrong shape" in text
    assert [f"bad.parquet row {row}: " in text for row in (0, 1, 10, 11)] == [False, True, True, False]
    assert "and 2 more" in text


def test_many_rows_are_stored_flat(files: Any, tokenizer: Any, prompt_row: Row) -> None:
    rows = [{**prompt_row(""), "prompt": "x" * (1 + n % 7)} for n in range(5000)]
    dataset = PromptDataset(files.parquet(rows), tokenizer)
    assert dataset.tokens.dtype == torch.int32
    assert np.array_equal(dataset.tokens.lengths.numpy(), 1 + np.arange(5000) % 7)


def test_rows_that_hold_images_are_refused_and_empty_ones_are_not(
    files: Any, tokenizer: Any, prompt_row: Row
) -> None:
    rows = [prompt_row("1+1=", "2") | {"images": images} for images in ([], None, ["cat.png"])]
    form = PromptForm(media_keys=("images", "videos"))
    assert len(PromptDataset(files.parquet(rows[:2]), tokenizer, form=form)) == 2
    assert len(PromptDataset(files.parquet(rows), tokenizer)) == 3
    error = raised(files.parquet(rows), tokenizer, form=form)
    assert "row 2: images: not empty" in error


@pytest.mark.parametrize("split_special", [False, True])
def test_texts_are_tokenised_as_the_tokenizer_does_in_a_call(tokenizer: Any, split_special: bool) -> None:
    """This also holds if an earlier call, or the tokenizer's file, turned on truncation and padding."""
    draw = random.Random(repr(split_special))
    tokenizer.split_special_tokens = split_special
    pieces = [*tokenizer.all_special_tokens, "ä", "\U0001f600", "\n\n", "  ", "the", "\u202e", "9", "\x00"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(0, 40))) for _ in range(200)]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert [ids.tolist() for ids in tokenize(tokenizer, texts)] == expected


def test_a_tokenizer_with_a_call_of_its_own_is_called(tokenizer: Any) -> None:
    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: Any, **options: Any) -> Any:
            return super().__call__([each.upper() for each in text], **options)

    own = copy.deepcopy(tokenizer)
    own.__class__ = Shouting
    assert tokenize(own, ["abc"])[0].tolist() == tokenize(tokenizer, ["ABC"])[0].tolist()
