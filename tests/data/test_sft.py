import pytest
import torch

from tandem.data.loader import BatchLoader
from tandem.data.mixture import EpochOrder
from tests.data.cases import chatml, talk

DROPS_THINKING = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def learnt(data, dataset, row=0):
    tokens, mask = dataset.tokens.row(row), dataset.response_mask.row(row)
    cuts = (mask.diff().nonzero().flatten() + 1).tolist()
    runs = zip(tokens.tensor_split(cuts), mask.tensor_split(cuts), strict=True)
    return [(data.tokenizer.decode(ids), bool(part[0])) for ids, part in runs]


def pair(prompt, response):
    return {"prompt": prompt, "response": response}


def test_every_turn_of_the_assistant_is_learnt_and_nothing_else(demonstrations):
    system = {"role": "system", "content": "s"}
    rows = [{"messages": [system, *talk("1+1?", "2", "sure?", "yes")]}, {"messages": talk("a", "b")}]
    dataset = demonstrations(rows)
    assert learnt(demonstrations, dataset) == [
        ("<|im_start|>system\ns<|im_end|>\n" + chatml("1+1?"), False),
        ("2<|im_end|>", True), ("\n" + chatml("sure?"), False), ("yes<|im_end|>", True), ("\n", False),
    ]  # fmt: skip
    whole = demonstrations.tokenizer.apply_chat_template(rows[1]["messages"], tokenize=False)
    assert demonstrations.texts(dataset.tokens)[1] == whole


def test_the_answers_first_token_is_the_one_the_model_would_write(demonstrations):
    """The tokenizer would merge a newline before the turn with the "h" that starts the response."""
    dataset = demonstrations([{"messages": talk("a", "hi")}])
    prompt, answer, rest = map(demonstrations.ids, (chatml("a"), "hi<|im_end|>", "\n"))
    assert dataset.tokens.row(0).tolist() == prompt + answer + rest
    assert dataset.response_mask.row(0).tolist() == [False] * len(prompt) + [True] * len(answer) + [False]
    assert len(demonstrations.ids("\nhi")) == 2


def test_template_without_end_token_ends_with_the_turn(demonstrations):
    demonstrations.tokenizer.chat_template = (
        "{% for m in messages %}{{ ('Q:' if m.role == 'user' else 'A:') + m.content + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    dataset = demonstrations([{"messages": talk("1", "2", "3", "4")}])
    expected = [("Q:1;A:", False), ("2;", True), ("Q:3;A:", False), ("4;", True)]
    assert learnt(demonstrations, dataset) == expected


def test_template_that_drops_earlier_thinking(demonstrations):
    demonstrations.tokenizer.chat_template = DROPS_THINKING
    dataset = demonstrations([{"messages": talk("1", "2", "3", "4")}])
    assert len(dataset) == len(dataset.digests) == 2
    first = "[user]1<|im_end|>\n[assistant]"
    second = first + "2<|im_end|>\n[user]3<|im_end|>\n[assistant]"
    assert learnt(demonstrations, dataset) == [(first, False), ("<think></think>2<|im_end|>", True)]
    last = [(second, False), ("<think></think>4<|im_end|>", True), ("\n", False)]
    assert learnt(demonstrations, dataset, 1) == last
    columns = dataset.batch([1, 0], uid_prefix="0").non_tensor_batch
    assert [list(columns[name]) for name in ("index", "uid")] == [[0, 0], ["0-1", "0-0"]]


@pytest.mark.parametrize(("row", "keys", "expected"), [
    (pair("3+4=", "7"), {}, [("3+4=", False), ("7<|im_end|>", True)]),
    (pair("x\n", "h"), {}, [("x\n", False), ("h<|im_end|>", True)]),
    ({"q": talk("3+4?"), "a": "7"}, {"prompt_key": "q", "response_key": "a"},
     [(chatml("3+4?"), False), ("7<|im_end|>", True)]),
    ({"text": "1+1=2"}, {}, [("1", False), ("+1=2<|im_end|>", True)]),
])  # fmt: skip
def test_pairs_and_texts(demonstrations, row, keys, expected):
    dataset = demonstrations([row], **keys)
    assert learnt(demonstrations, dataset) == expected
    assert dataset.tokens.row(0)[-1] == demonstrations.tokenizer.eos_token_id


def test_batches_for_the_trainer(demonstrations):
    dataset = demonstrations([pair("x" * (1 + n), str(n)) for n in range(5)])
    batch = BatchLoader(dataset, 2, EpochOrder(shuffle=True, seed=1)).next()
    picked = list(batch.non_tensor_batch["index"])
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask")
    assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert tokens.lengths.tolist() == [row + 3 for row in picked]
    assert torch.equal(mask.offsets, tokens.offsets) and int(mask.values.sum()) == 4
    assert list(batch.non_tensor_batch["uid"]) == [f"0-{row}" for row in picked]


@pytest.mark.parametrize(("prompt", "length", "truncation", "text", "mask"), [
    ("1234", 5, "right", "1234x", [False] * 4 + [True]),
    ("1234", 5, "left", "4xyz<|im_end|>", [False, True, True, True, True]),
    ("1234", 5, "middle", "12yz<|im_end|>", [False, False, True, True, True]),
    ("1", 3, "left", "yz<|im_end|>", [False, True, True]),  # the first token is never learned
])  # fmt: skip
def test_truncation_cuts_tokens_and_mask_alike(demonstrations, prompt, length, truncation, text, mask):
    dataset = demonstrations([pair(prompt, "xyz")], max_length=length, truncation=truncation)
    assert demonstrations.texts(dataset.tokens) == [text] and dataset.response_mask.row(0).tolist() == mask


def test_overlong_rows_rows_with_nothing_left_and_tokenizers_without_end_or_template(demonstrations):
    rows = [pair("1" * n, "2") for n in (1, 5, 9)]
    error = demonstrations.refused(rows, max_length=7)
    assert error.field == "data.max_length" and "1 row(s) of 3" in error.message
    assert "row 2: 11 tok" in str(error.got)
    error = demonstrations.refused(rows, max_length=6, truncation="right")
    assert "1 row(s)" in error.message and "row 2: none of its 6 tokens" in str(error.got)
    demonstrations.tokenizer.chat_template = None
    assert "no chat template" in str(demonstrations.refused([{"messages": talk("1", "2")}]))
    demonstrations.tokenizer.eos_token = None
    assert demonstrations.refused([pair("1", "2")]).field == "tokenizer.eos_token"


COMPLETED = {"prompt": talk("a"), "completion": talk("", "b")[1:]}


@pytest.mark.parametrize(("good", "change", "problem"), [
    ({"messages": talk("1", "2")}, {"messages": talk("1")}, "messages: no turn of the assistant"),
    ({"messages": talk("1", "2")}, {"messages": talk("", "2", "1")[1:]}, "messages: the first message is"),
    ({"messages": talk("1", "2")}, {"messages": []}, "messages: an empty list"),
    ({"messages": talk("1", "2")}, {"messages": None}, "messages: not a list of messages but null"),
    (pair("1", "2"), {"prompt": ""}, "prompt: an empty text"),
    (pair("1", "2"), {"response": None}, "response: null, not text"),
    (COMPLETED, {"completion": talk("only the user")}, "completion: no turn of the assistant"),
    (COMPLETED | {"tools": "[]"}, {"tools": "7"}, "tools: not a list of JSON schemas but"),
])  # fmt: skip
def test_wrong_rows(demonstrations, good, change, problem):
    error = demonstrations.refused([good, good | change])
    assert "1 row(s)" in error.message and f"row 1: {problem}" in str(error.got)


def test_missing_columns_and_files_of_different_forms(demonstrations):
    error = demonstrations.refused([{"prompt": "1", "answer": "2"}])
    assert "'messages' or 'response' or 'completion' or 'text'" in error.message
    assert error.got == "columns prompt, answer"
    rows = {"a.parquet": {"messages": talk("1", "2")}, "b.parquet": pair("1", "2")}
    paths = [demonstrations.files.parquet([row], name) for name, row in rows.items()]
    assert demonstrations.refused(paths).got == "messages; prompt, response"


def test_a_completion_of_messages_follows_its_prompt(demonstrations):
    prompt, completion = talk("1+1?", "2", "sure?"), talk("", "yes", "thanks", "bye")[1:]
    dataset = demonstrations([{"prompt": prompt, "completion": completion}])
    whole = demonstrations([{"messages": prompt + completion}])
    assert dataset.tokens.row(0).equal(whole.tokens.row(0))
    written = [text for text, mask in learnt(demonstrations, dataset) if mask]
    assert written == ["yes<|im_end|>", "bye<|im_end|>"]
    text = demonstrations.refused([{"prompt": "a text", "completion": completion}])
    assert "row 0: completion: a list of messages, but the prompt is not" in str(text)


def test_tools_are_shown_to_the_template_of_prompts_and_completions(demonstrations):
    demonstrations.tokenizer.chat_template = (
        "{% if tools %}tools {{ tools | length }}\n{% endif %}"
        "{% for m in messages %}{{ m.role + ':' + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = [COMPLETED | {"tools": '[{"name": "f"}, {"name": "g"}]'}]
    texts = demonstrations.texts(demonstrations(rows).tokens)
    assert texts == ["tools 2\nuser:a<|im_end|>assistant:b<|im_end|>"]
    assert "missing column 'mine'" in str(demonstrations.refused(rows, tools_key="mine"))
