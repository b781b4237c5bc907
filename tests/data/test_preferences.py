import json

import pytest
import torch

from tests.data.cases import chatml, talk


def shown(pairs, data, side="chosen", row=0):
    ids, marks = getattr(data, side).row(row), getattr(data, f"{side}_mask").row(row)
    return pairs.tokenizer.decode(ids[~marks]), pairs.tokenizer.decode(ids[marks])


def test_texts_follow_their_prompt_and_end(pairs):
    rows = [{"prompt": talk("1+1?"), "chosen": "2", "rejected": "11"}]
    data = pairs([*rows, {"prompt": talk("hi"), "chosen": "", "rejected": "x"}])
    assert shown(pairs, data) == (chatml("1+1?"), "2<|im_end|>")
    assert shown(pairs, data, "rejected") == (chatml("1+1?"), "11<|im_end|>")
    assert shown(pairs, data, row=1) == (chatml("hi"), "<|im_end|>") and data.margins.tolist() == [0, 0]


def test_conversations_end_with_the_answer_as_the_model_writes_it(pairs):
    data = pairs([
        {"prompt": "unused", "chosen": talk("a", "b", "c", "good"), "rejected": talk("a", "b", "c", "bad")}
    ])  # fmt: skip
    assert shown(pairs, data) == (chatml("a") + "\n" + chatml("c"), "b<|im_end|>good<|im_end|>")
    assert pairs.texts(data.rejected)[0].endswith("assistant\nbad<|im_end|>")


def test_a_batch_has_a_pair_in_each_row(pairs):
    rows = [
        {"q": "x" * (1 + n), "good": "1" * n, "bad": "2" * (5 - n), "by": n / 4 if n else 3.0}
        for n in range(5)
    ]
    path = pairs.files.text("\n".join(map(json.dumps, rows)), "pairs.jsonl")
    data = pairs(path, prompt_key="q", chosen_key="good", rejected_key="bad", margin_key="by")
    batch = data.batch([3, 0], uid_prefix="2")
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask")
    assert tokens.dtype == torch.int64 and batch.dense("margin").tolist() == [0.75, 3]
    assert batch.ragged("sequence_lengths").values.tolist() == [8, 7, 2, 7]
    both = ["xxxx111<|im_end|>xxxx22<|im_end|>", "x<|im_end|>x22222<|im_end|>"]
    assert pairs.texts(tokens) == both
    learnt = pairs.texts(row[marks] for row, marks in zip(tokens, mask, strict=True))
    assert learnt == [text.replace("x", "") for text in both]
    assert list(batch.non_tensor_batch["uid"]) == ["2-3", "2-0"]
    assert list(batch.non_tensor_batch["index"]) == [3, 0]


def test_each_half_is_cut_by_itself(pairs):
    rows = [{"prompt": "1234", "chosen": "x", "rejected": "xyz"}]
    data = pairs(rows, max_length=6, truncation="left")
    assert shown(pairs, data) == ("1234", "x<|im_end|>")
    assert shown(pairs, data, "rejected") == ("34", "xyz<|im_end|>")
    assert "row 0: 8 tokens" in str(pairs.refused(rows, max_length=6))
    assert "none of its 4 tokens" in str(pairs.refused(rows, max_length=4, truncation="right"))


TEXTS = {"prompt": "1", "chosen": "2", "rejected": "3", "margin": 1.0}
TALKS = {"chosen": talk("a", "b"), "rejected": talk("a", "c")}
APART = {"prompt": talk("a"), "chosen": talk("", "b")[1:], "rejected": talk("", "c")[1:]}


@pytest.mark.parametrize(("good", "change", "problem"), [
    (TEXTS, {"prompt": ""}, "prompt: an empty text"),
    (TEXTS, {"rejected": None}, "rejected: null, not text"),
    (TEXTS, {"margin": None}, "margin: null, not a number"),
    (TEXTS, {"margin": float("nan")}, "margin: nan, not a finite number"),
    (TALKS, {"chosen": talk("a")}, "chosen: no turn of the assistant"),
    (TALKS, {"chosen": talk("a", "b", "c")}, "chosen: the last message is not the assistant's"),
    (TALKS, {"chosen": talk("a", "b")[1:]}, "chosen: the first message is the assistant's"),
    (TALKS, {"chosen": None}, "chosen: not a list of messages but null"),
    (APART, {"rejected": talk("", "b", "c")[1:]}, "rejected: the last message is not the assistant's"),
])  # fmt: skip
def test_wrong_rows_of_pairs(pairs, good, change, problem):
    keys = {"margin_key": "margin"} if "margin" in good else {}
    assert f"row 1: {problem}\n" in str(pairs.refused([good, good | change], **keys))


@pytest.mark.parametrize(("row", "keys", "named"), [
    ({"chosen": "2", "rejected": "3"}, {"prompt_key": "asked"}, "missing column 'asked'\n"),
    ({"chosen": "2", "rejected": "3"}, {"margin_key": "margin"}, "or 'margin'\n"),
    ({"prompt": "1", "chosen": "2"}, {}, "missing column 'rejected'"),
    ({"prompt": "a", "other": "b"}, {}, "'chosen' and 'rejected'"),
])  # fmt: skip
def test_missing_columns_of_a_pair(pairs, row, keys, named):
    assert str(pairs.refused([row], **keys)).count(named) == 1


def test_answers_of_messages_follow_a_prompt_of_messages(pairs):
    apart = {"prompt": talk("a", "b", "c"), "chosen": talk("", "good")[1:], "rejected": talk("", "bad")[1:]}
    whole = {"chosen": talk("a", "b", "c", "good"), "rejected": talk("a", "b", "c", "bad")}
    data, joined = pairs([apart]), pairs([whole])
    assert data.chosen.row(0).equal(joined.chosen.row(0))
    assert data.rejected.row(0).equal(joined.rejected.row(0))
    prompt, answer = shown(pairs, data)
    assert answer == "good<|im_end|>" and prompt.endswith("c<|im_end|>\n<|im_start|>assistant\n")
    error = pairs.refused([apart | {"prompt": "a text"}])
    assert "row 0: chosen: a list of messages, but the prompt is not" in str(error)


def test_texts_without_a_prompt_are_the_whole(pairs):
    data = pairs([{"chosen": "The sky is blue.", "rejected": "no"}])
    texts = pairs.texts(data.chosen) + pairs.texts(data.rejected)
    assert texts == ["The sky is blue.<|im_end|>", "no<|im_end|>"]
    assert data.chosen_mask.row(0).tolist() == [False] + [True] * 16
