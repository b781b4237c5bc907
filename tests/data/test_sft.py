"""SFTDataset: the exact tokens that the model learns, and the errors for bad rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.data.loader import BatchLoader
from tandem.data.mixture import EpochOrder
from tandem.data.sft import SFTDataset
from tandem.errors import DataError


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation in which user and assistant alternate."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[place % 2], "content": content}
        for place, content in enumerate(contents)
    ]


def learnt(dataset: SFTDataset, tokenizer: Any, row: int = 0) -> list[tuple[str, bool]]:
    """Return the text of each run of equal mask values."""
    tokens, mask = dataset.tokens.row(row), dataset.response_mask.row(row)
    cuts = (mask.diff().nonzero().flatten() + 1).tolist()
    runs = zip(tokens.tensor_split(cuts), mask.tensor_split(cuts), strict=True)
    return [(tokenizer.decode(ids), bool(part[0])) for ids, part in runs]


def raised(*args: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        SFTDataset(*args, **options)
    return str(caught.value)


def test_every_turn_of_the_assistant_is_learnt_and_nothing_else(files: Any, tokenizer: Any) -> None:
    rows = [{"messages": turns("1+1?", "2", "sure?", "yes", system="s")}, {"messages": turns("a", "b")}]
    dataset = SFTDataset(files.parquet(rows), tokenizer)
    assert learnt(dataset, tokenizer) == [
        ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", False),
        ("2<|im_end|>", True),
        ("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n", False),
        ("yes<|im_end|>", True),
        ("\n", False),
    ]
    assert tokenizer.decode(dataset.tokens.row(1)) == tokenizer.apply_chat_template(
        rows[1]["messages"], tokenize=False
    )


def test_the_answers_first_token_is_the_one_the_model_would_write(files: Any, tokenizer: Any) -> None:
    """The tokenizer would merge a newline before the turn with the "h" that starts the response."""
    messages = turns("a", "hi")
    dataset = SFTDataset(files.parquet([{"messages": messages}]), tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    answer = tokenizer("hi<|im_end|>", add_special_tokens=False)["input_ids"]
    rest = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert dataset.tokens.row(0).tolist() == prompt + answer + rest
    mask = [False] * len(prompt) + [True] * len(answer) + [False]
    assert dataset.response_mask.row(0).tolist() == mask
    assert len(tokenizer("\nhi", add_special_tokens=False)["input_ids"]) == 2


def test_template_without_end_token_ends_with_the_turn(files: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('Q:' if m.role == 'user' else 'A:') + m.content + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    dataset = SFTDataset(files.parquet([{"messages": turns("1", "2", "3", "4")}]), tokenizer)
    assert learnt(dataset, tokenizer) == [("Q:1;A:", False), ("2;", True), ("Q:3;A:", False), ("4;", True)]


def test_template_that_drops_earlier_thinking(files: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    dataset = SFTDataset(files.parquet([{"messages": turns("1", "2", "3", "4")}]), tokenizer)
    assert len(dataset) == len(dataset.digests) == 2
    assert learnt(dataset, tokenizer) == [
        ("[user]1<|im_end|>\n[assistant]", False),
        ("<think></think>2<|im_end|>", True),
    ]
    assert learnt(dataset, tokenizer, 1) == [
        ("[user]1<|im_end|>\n[assistant]2<|im_end|>\n[user]3<|im_end|>\n[assistant]", False),
        ("<think></think>4<|im_end|>", True),
        ("\n", False),
    ]
    batch = dataset.batch([1, 0], uid_prefix="0")
    assert list(batch.non_tensor_batch["index"]) == [0, 0]
    assert list(batch.non_tensor_batch["uid"]) == ["0-1", "0-0"]


def test_template_whose_turns_cannot_be_found(files: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    text = raised(files.parquet([{"messages": turns("1", "2")}]), tokenizer)
    assert text.startswith("tokenizer.chat_template: ")
    assert "it changes the first 1 message(s)" in text and "row" not in text
    assert "model.custom_chat_template=" in text


def test_pairs_of_text(files: Any, tokenizer: Any) -> None:
    rows = [{"prompt": "3+4=", "response": "7"}, {"prompt": "x\n", "response": "h"}]
    dataset = SFTDataset(files.parquet(rows), tokenizer)
    assert learnt(dataset, tokenizer) == [("3+4=", False), ("7<|im_end|>", True)]
    assert learnt(dataset, tokenizer, 1) == [("x\n", False), ("h<|im_end|>", True)]
    assert dataset.tokens.row(0)[-1] == tokenizer.eos_token_id


def test_pairs_of_messages_and_text_under_other_names(files: Any, tokenizer: Any) -> None:
    path = files.parquet([{"q": turns("3+4?"), "a": "7"}])
    dataset = SFTDataset(path, tokenizer, prompt_key="q", response_key="a")
    prompt = "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    assert learnt(dataset, tokenizer) == [(prompt, False), ("7<|im_end|>", True)]


def test_batches_for_the_trainer(files: Any, tokenizer: Any) -> None:
    rows = [{"prompt": "x" * (1 + n), "response": str(n)} for n in range(5)]
    dataset = SFTDataset(files.parquet(rows), tokenizer)
    batch = BatchLoader(dataset, 2, EpochOrder(shuffle=True, seed=1)).next()
    picked = list(batch.non_tensor_batch["index"])
    assert batch.ragged("tokens").dtype == torch.int64
    assert batch.ragged("tokens").lengths.tolist() == [row + 3 for row in picked]
    assert batch.ragged("response_mask").dtype == torch.bool
    assert torch.equal(batch.ragged("response_mask").offsets, batch.ragged("tokens").offsets)
    assert int(batch.ragged("response_mask").values.sum()) == 4
    assert list(batch.non_tensor_batch["uid"]) == [f"0-{row}" for row in picked]


@pytest.mark.parametrize(("truncation", "text", "mask"), [
    ("right", "1234x", [False] * 4 + [True]),
    ("left", "4xyz<|im_end|>", [False, True, True, True, True]),
    ("middle", "12yz<|im_end|>", [False, False, True, True, True]),
])  # fmt: skip
def test_truncation_cuts_tokens_and_mask_alike(
    files: Any, tokenizer: Any, truncation: str, text: str, mask: list[bool]
) -> None:
    path = files.parquet([{"prompt": "1234", "response": "xyz"}])
    dataset = SFTDataset(path, tokenizer, max_length=5, truncation=truncation)
    assert tokenizer.decode(dataset.tokens.row(0)) == text
    assert dataset.response_mask.row(0).tolist() == mask


def test_first_token_is_never_learnt(files: Any, tokenizer: Any) -> None:
    path = files.parquet([{"prompt": "1", "response": "xyz"}])
    dataset = SFTDataset(path, tokenizer, max_length=3, truncation="left")
    assert tokenizer.decode(dataset.tokens.row(0)) == "yz<|im_end|>"
    assert dataset.response_mask.row(0).tolist() == [False, True, True]


def test_overlong_rows_and_rows_with_nothing_left(files: Any, tokenizer: Any) -> None:
    path = files.parquet([{"prompt": "1" * n, "response": "2"} for n in (1, 5, 9)])
    text = raised(path, tokenizer, max_length=7)
    assert text.startswith(
        "data.max_length: 1 row(s) of 3 are over the length limit\n  got:      row 2: 11 tok"
    )
    text = raised(path, tokenizer, max_length=6, truncation="right")
    assert "train.parquet: 1 row(s) without any token to train on" in text
    assert "row 2: none of its 6 tokens" in text


def test_no_end_token(files: Any, tokenizer: Any) -> None:
    tokenizer.eos_token = None
    text = raised(files.parquet([{"prompt": "1", "response": "2"}]), tokenizer)
    assert text.startswith("tokenizer.eos_token: the tokenizer has no end-of-sequence token")


def test_no_template(files: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert "has no chat template" in raised(files.parquet([{"messages": turns("1", "2")}]), tokenizer)


@pytest.mark.parametrize(("row", "problem"), [
    ({"messages": turns("1")}, "messages: no turn of the assistant"),
    ({"messages": turns("1", "2")[::-1]}, "messages: the first message is the assistant's"),
    ({"messages": []}, "messages: an empty list of messages"),
    ({"messages": None}, "messages: not a list of messages but null"),
])  # fmt: skip
def test_wrong_conversations(files: Any, tokenizer: Any, row: dict[str, Any], problem: str) -> None:
    text = raised(files.parquet([{"messages": turns("1", "2")}, row]), tokenizer)
    assert f"1 row(s) of the wrong shape\n  got:      row 1: {problem}\n" in text


@pytest.mark.parametrize(("row", "problem"), [
    ({"prompt": "", "response": "2"}, "prompt: an empty text"),
    ({"prompt": "1", "response": None}, "response: null, not text"),
])  # fmt: skip
def test_wrong_pairs(files: Any, tokenizer: Any, row: dict[str, Any], problem: str) -> None:
    text = raised(files.parquet([{"prompt": "1", "response": "2"}, row]), tokenizer)
    assert f"1 row(s) of the wrong shape\n  got:      row 1: {problem}\n" in text


def test_missing_columns_name_both_forms(files: Any, tokenizer: Any) -> None:
    text = raised(files.parquet([{"prompt": "1", "answer": "2"}]), tokenizer)
    assert "missing column 'messages' or 'response' or 'completion' or 'text'\n" in text
    assert "got:      columns prompt, answer\n  expected: messages or prompt, response or prompt, " in text


def test_files_of_different_forms(files: Any, tokenizer: Any) -> None:
    paths = [
        files.parquet([{"messages": turns("1", "2")}], "a.parquet"),
        files.parquet([{"prompt": "1", "response": "2"}], "b.parquet"),
    ]
    assert "the files have different columns\n  got:      messages; prompt, response\n" in raised(
        paths, tokenizer
    )


def test_a_completion_of_messages_follows_its_prompt(files: Any, tokenizer: Any) -> None:
    prompt, completion = turns("1+1?", "2", "sure?"), turns("", "yes", "thanks", "bye")[1:]
    dataset = SFTDataset(files.parquet([{"prompt": prompt, "completion": completion}]), tokenizer)
    whole = SFTDataset(files.parquet([{"messages": prompt + completion}], "whole.parquet"), tokenizer)
    assert dataset.tokens.row(0).equal(whole.tokens.row(0))
    written = [text for text, mask in learnt(dataset, tokenizer) if mask]
    assert written == ["yes<|im_end|>", "bye<|im_end|>"]


def test_a_text_is_learnt_whole(files: Any, tokenizer: Any) -> None:
    dataset = SFTDataset(files.parquet([{"text": "1+1=2"}]), tokenizer)
    assert learnt(dataset, tokenizer) == [("1", False), ("+1=2<|im_end|>", True)]


def test_tools_are_shown_to_the_template_of_prompts_and_completions(files: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% if tools %}tools {{ tools | length }}\n{% endif %}"
        "{% for m in messages %}{{ m.role + ':' + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    row = {"prompt": turns("a"), "completion": turns("", "b")[1:], "tools": '[{"name": "f"}, {"name": "g"}]'}
    dataset = SFTDataset(files.parquet([row]), tokenizer)
    assert tokenizer.decode(dataset.tokens.row(0)) == "tools 2\nuser:a<|im_end|>assistant:b<|im_end|>"
    assert "missing column 'mine'" in raised(files.parquet([row]), tokenizer, tools_key="mine")


@pytest.mark.parametrize(("row", "problem"), [
    ({"prompt": "a text"}, "completion: a list of messages, but the prompt is not"),
    ({"completion": turns("only the user")}, "completion: no turn of the assistant"),
    ({"tools": "7"}, "tools: not a list of JSON schemas but"),
])  # fmt: skip
def test_wrong_completions(files: Any, tokenizer: Any, row: dict[str, Any], problem: str) -> None:
    good = {"prompt": turns("a"), "completion": turns("", "b")[1:]}
    assert f"row 0: {problem}" in raised(files.parquet([good | row]), tokenizer)
