"""Columns that config keys name: answers, system messages, tools, plain questions, and multi-turn prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem.data.forms import PromptForm
from tandem.data.prompts import PromptDataset
from tandem.data.sft import SFTDataset
from tandem.errors import DataError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{{ t.function.keys() | list }}{% endfor %}]"
    "{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.keys() | list }}){% endfor %}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def texts(dataset: PromptDataset, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(ids) for ids in dataset.tokens]


def refused(*args: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        PromptDataset(*args, **options)
    return str(caught.value)


def test_questions_and_answers_of_a_plain_table(files: Any, tokenizer: Any) -> None:
    rows = [
        {"question": "1+1=", "answer": "2", "rules": "be brief"},
        {"question": "3", "answer": 3, "rules": None},
    ]
    rows[1]["answer"] = "3"
    form = PromptForm(
        prompt_key="question", answer_key="answer", system_key="rules", apply_chat_template=True
    )
    dataset = PromptDataset(files.parquet(rows), tokenizer, form=form)
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert texts(dataset, tokenizer) == [system + user.format("1+1="), user.format("3")]
    batch = dataset.batch([0, 1], uid_prefix="0").non_tensor_batch
    assert batch["ground_truth"].tolist() == ["2", "3"]
    assert batch["data_source"].tolist() == ["data", "data"]
    assert batch["messages"][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1="},
    ]


def test_text_stays_as_it_is_unless_it_is_said_to_be_a_question(files: Any, tokenizer: Any) -> None:
    path = files.parquet([{"prompt": "12+7=", "answer": "19"}])
    dataset = PromptDataset(path, tokenizer, form=PromptForm(answer_key="answer"))
    assert texts(dataset, tokenizer) == ["12+7="]


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_of_a_row_go_to_the_chat_template(
    files: Any, tokenizer: Any, prompt_row: Callable[..., Any], as_text: bool
) -> None:
    tokenizer.chat_template = WITH_TOOLS
    other = {"type": "function", "function": {"name": "sub", "description": "minus"}}
    tools: list[Any] = [[TOOL], [other], None]
    rows = [prompt_row(text) for text in "abc"]
    for row, of_row in zip(rows, tools, strict=True):
        row["tools"] = json.dumps(of_row) if as_text and of_row else of_row
    dataset = PromptDataset(files.parquet(rows), tokenizer, form=PromptForm(tools_key="tools"))
    found = texts(dataset, tokenizer)
    assert found == [
        "[add['name', 'parameters']]<user>a<assistant>",
        "[sub['name', 'description']]<user>b<assistant>",
        "<user>c<assistant>",
    ]


def test_prompts_of_several_turns_with_calls(
    files: Any, tokenizer: Any, prompt_row: Callable[..., Any]
) -> None:
    tokenizer.chat_template = WITH_TOOLS
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2"}, {"role": "user", "content": "sure?"},
    ]  # fmt: skip
    again = [{"role": "assistant", "content": "x", "tool_calls": [
        {"type": "function", "function": {"name": "sub", "arguments": {"b": 1}}}]}]  # fmt: skip
    rows = [prompt_row(turns), prompt_row([turns[0], *again, turns[3]])]
    dataset = PromptDataset(files.parquet(rows), tokenizer)
    assert texts(dataset, tokenizer) == [
        "<user>1+1?<assistant>add(['a'])<|im_end|><tool>2<user>sure?<assistant>",
        "<user>1+1?<assistant>xsub(['b'])<|im_end|><user>sure?<assistant>",
    ]


def test_demonstrations_with_tools(files: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = WITH_TOOLS
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    path = files.parquet([{"messages": turns, "tools": json.dumps([TOOL])}])
    dataset = SFTDataset(path, tokenizer, tools_key="tools")
    assert tokenizer.decode(dataset.tokens.row(0)).startswith("[add[")
    learnt = dataset.tokens.row(0)[dataset.response_mask.row(0)]
    assert tokenizer.decode(learnt) == "2<|im_end|>"


@pytest.mark.parametrize(("row", "form", "said"), [
    ({"answer": None}, {"answer_key": "answer"}, "row 0: answer is null, not an answer"),
    ({"tools": "add"}, {"tools_key": "tools"}, "row 0: tools: Expecting value"),
    ({"tools": '{"a": 1}'}, {"tools_key": "tools"}, "row 0: tools: not a list of JSON schemas but"),
    ({"rules": 3}, {"system_key": "rules"}, "row 0: rules: of type int, not text"),
    ({"rules": "r", "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
     {"system_key": "rules"}, "row 0: rules: not empty, but the prompt already has a system message"),
    ({"rules": "r", "prompt": [1, 2]}, {"system_key": "rules"}, "prompt: token ids"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_named(
    files: Any, tokenizer: Any, prompt_row: Callable[..., Any], row: Any, form: Any, said: str
) -> None:
    assert said in refused(files.parquet([prompt_row("a") | row]), tokenizer, form=PromptForm(**form))


def test_a_key_of_a_column_that_is_not_there(
    files: Any, tokenizer: Any, prompt_row: Callable[..., Any]
) -> None:
    text = refused(files.parquet([prompt_row("a")]), tokenizer, form=PromptForm(tools_key="tool"))
    assert "missing column 'tool'" in text and "data.tools_key" in text


def test_a_mixture_names_every_source(files: Any, tokenizer: Any, prompt_row: Callable[..., Any]) -> None:
    rows = [prompt_row("a", source=source) for source in ("x", "y", "x")]
    dataset = PromptDataset(files.parquet(rows), tokenizer)
    assert dataset.places_of_sources(("y", "x")).tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"(?s)data.mixture: .*weight.*got:      y"):
        dataset.places_of_sources(("x",))
