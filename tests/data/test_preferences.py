"""PreferenceDataset: the exact tokens of a pair, and the errors for bad rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tandem.data.preferences import PreferenceDataset
from tandem.errors import DataError
from tandem.protocol import Ragged

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def shown(tokens: Ragged, mask: Ragged, tokenizer: Any, row: int = 0) -> tuple[str, str]:
    """Return the text of the prompt and the text of the response."""
    ids, marks = tokens.row(row), mask.row(row)
    return tokenizer.decode(ids[~marks]), tokenizer.decode(ids[marks])


def raised(*args: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        PreferenceDataset(*args, **options)
    return str(caught.value)


def test_texts_follow_their_prompt_and_end(files: Any, tokenizer: Any) -> None:
    rows = [
        {"prompt": talk("1+1?"), "chosen": "2", "rejected": "11"},
        {"prompt": talk("hi"), "chosen": "", "rejected": "x"},
    ]
    data = PreferenceDataset(files.parquet(rows), tokenizer)
    assert shown(data.chosen, data.chosen_mask, tokenizer) == (CHAT.format("1+1?"), "2<|im_end|>")
    assert shown(data.rejected, data.rejected_mask, tokenizer) == (CHAT.format("1+1?"), "11<|im_end|>")
    assert shown(data.chosen, data.chosen_mask, tokenizer, 1) == (CHAT.format("hi"), "<|im_end|>")
    assert data.margins.tolist() == [0, 0]


def test_conversations_end_with_the_answer_as_the_model_writes_it(files: Any, tokenizer: Any) -> None:
    """Template text after the last end-of-sequence token is left out, and a prompt column is not read."""
    rows = [
        {"prompt": "unused", "chosen": talk("a", "b", "c", "good"), "rejected": talk("a", "b", "c", "bad")}
    ]
    data = PreferenceDataset(files.parquet(rows), tokenizer)
    asked, answer = shown(data.chosen, data.chosen_mask, tokenizer)
    assert asked == CHAT.format("a") + "\n" + CHAT.format("c")
    assert answer == "b<|im_end|>good<|im_end|>"
    assert tokenizer.decode(data.rejected.row(0)).endswith("assistant\nbad<|im_end|>")


def test_a_batch_has_a_pair_in_each_row(files: Any, tokenizer: Any) -> None:
    rows = [
        {"q": "x" * (1 + n), "good": "1" * n, "bad": "2" * (5 - n), "by": n / 4 if n else 3.0}
        for n in range(5)
    ]
    path = files.text("\n".join(map(json.dumps, rows)), "pairs.jsonl")
    data = PreferenceDataset(
        path, tokenizer, prompt_key="q", chosen_key="good", rejected_key="bad", margin_key="by"
    )
    batch = data.batch([3, 0], uid_prefix="2")
    tokens = batch.ragged("tokens")
    assert tokens.dtype == torch.int64 and batch.dense("margin").tolist() == [0.75, 3]
    assert batch.ragged("sequence_lengths").values.tolist() == [8, 7, 2, 7]
    assert [tokenizer.decode(row) for row in tokens] == [
        "xxxx111<|im_end|>xxxx22<|im_end|>",
        "x<|im_end|>x22222<|im_end|>",
    ]
    mask = batch.ragged("response_mask")
    assert [tokenizer.decode(row[marks]) for row, marks in zip(tokens, mask, strict=True)] == [
        "111<|im_end|>22<|im_end|>",
        "<|im_end|>22222<|im_end|>",
    ]
    assert list(batch.non_tensor_batch["uid"]) == ["2-3", "2-0"]
    assert list(batch.non_tensor_batch["index"]) == [3, 0]


def test_each_half_is_cut_by_itself(files: Any, tokenizer: Any) -> None:
    path = files.parquet([{"prompt": "1234", "chosen": "x", "rejected": "xyz"}])
    data = PreferenceDataset(path, tokenizer, max_length=6, truncation="left")
    assert shown(data.chosen, data.chosen_mask, tokenizer) == ("1234", "x<|im_end|>")
    assert shown(data.rejected, data.rejected_mask, tokenizer) == ("34", "xyz<|im_end|>")
    assert "row 0: 8 tokens" in raised(path, tokenizer, max_length=6)
    assert "none of its 4 tokens" in raised(path, tokenizer, max_length=4, truncation="right")


ROW = {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1.0}


@pytest.mark.parametrize(("changes", "problem"), [
    ({"prompt": ""}, "prompt: an empty text"),
    ({"rejected": None}, "rejected: null, not text"),
    ({"margin": None}, "margin: null, not a number"),
    ({"margin": float("nan")}, "margin: nan, not a finite number"),
])  # fmt: skip
def test_wrong_rows_of_texts(files: Any, tokenizer: Any, changes: dict[str, Any], problem: str) -> None:
    path = files.parquet([ROW, ROW | changes])
    assert f"row 1: {problem}\n" in raised(path, tokenizer, margin_key="margin")


@pytest.mark.parametrize(("chosen", "problem"), [
    (talk("a"), "chosen: no turn of the assistant"),
    (talk("a", "b", "c"), "chosen: the last message is not the assistant's"),
    (talk("a", "b")[1:], "chosen: the first message is the assistant's"),
    (None, "chosen: not a list of messages but null"),
])  # fmt: skip
def test_wrong_conversations_of_a_pair(files: Any, tokenizer: Any, chosen: Any, problem: str) -> None:
    good = {"chosen": talk("a", "b"), "rejected": talk("a", "c")}
    path = files.parquet([good, good | {"chosen": chosen}])
    assert f"row 1: {problem}\n" in raised(path, tokenizer)


def test_missing_columns_of_a_pair(files: Any, tokenizer: Any) -> None:
    path = files.parquet([{"chosen": "2", "rejected": "3"}])
    assert "missing column 'asked'\n" in raised(path, tokenizer, prompt_key="asked")
    assert "or 'margin'\n" in raised(path, tokenizer, margin_key="margin")
    lone = files.parquet([{"prompt": "1", "chosen": "2"}], "lone.parquet")
    assert "missing column 'rejected'" in raised(lone, tokenizer)


def test_one_missing_column_is_named_once(files: Any, tokenizer: Any) -> None:
    text = raised(files.parquet([{"prompt": "a", "other": "b"}]), tokenizer)
    assert text.count("'chosen' and 'rejected'") == 1


def test_answers_of_messages_follow_a_prompt_of_messages(files: Any, tokenizer: Any) -> None:
    apart = [{"prompt": talk("a", "b", "c"), "chosen": talk("", "good")[1:], "rejected": talk("", "bad")[1:]}]
    whole = [{"chosen": talk("a", "b", "c", "good"), "rejected": talk("a", "b", "c", "bad")}]
    data = PreferenceDataset(files.parquet(apart), tokenizer)
    joined = PreferenceDataset(files.parquet(whole, "whole.parquet"), tokenizer)
    assert data.chosen.row(0).equal(joined.chosen.row(0))
    assert data.rejected.row(0).equal(joined.rejected.row(0))
    prompt, answer = shown(data.chosen, data.chosen_mask, tokenizer)
    assert answer == "good<|im_end|>" and prompt.endswith("c<|im_end|>\n<|im_start|>assistant\n")


def test_texts_without_a_prompt_are_the_whole(files: Any, tokenizer: Any) -> None:
    data = PreferenceDataset(files.parquet([{"chosen": "The sky is blue.", "rejected": "no"}]), tokenizer)
    assert tokenizer.decode(data.chosen.row(0)) == "The sky is blue.<|im_end|>"
    assert data.chosen_mask.row(0).tolist() == [False] + [True] * 16
    assert tokenizer.decode(data.rejected.row(0)) == "no<|im_end|>"


@pytest.mark.parametrize(("row", "problem"), [
    ({"prompt": "a text"}, "chosen: a list of messages, but the prompt is not"),
    ({"rejected": talk("", "b", "c")[1:]}, "rejected: the last message is not the assistant's"),
])  # fmt: skip
def test_answers_that_follow_no_prompt(files: Any, tokenizer: Any, row: dict[str, Any], problem: str) -> None:
    good = {"prompt": talk("a"), "chosen": talk("", "b")[1:], "rejected": talk("", "c")[1:]}
    assert f"row 0: {problem}\n" in raised(files.parquet([good | row]), tokenizer)
