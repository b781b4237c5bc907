import json

import pytest

from tandem.data.forms import PromptForm
from tandem.errors import DataError
from tests.data.cases import chatml, prompt_row, talk
from tests.support.refusing import refused

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


def test_questions_and_answers_of_a_plain_table(prompts):
    """Text stays as it is unless it is said to be a question."""
    rows = [{"question": "1+1=", "answer": "2", "rules": "be brief"}]
    rows.append({"question": "3", "answer": "3", "rules": None})
    keys = {"prompt_key": "question", "answer_key": "answer", "system_key": "rules"}
    dataset = prompts(rows, form=PromptForm(**keys, apply_chat_template=True))
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert prompts.texts(dataset.tokens) == [system + chatml("1+1="), chatml("3")]
    batch = dataset.batch([0, 1], uid_prefix="0").non_tensor_batch
    assert batch["ground_truth"].tolist() == ["2", "3"] and batch["data_source"].tolist() == ["data", "data"]
    assert batch["messages"][0] == [{"role": "system", "content": "be brief"}, *talk("1+1=")]
    dataset = prompts(rows[1:], form=PromptForm(prompt_key="question", answer_key="answer"))
    assert prompts.texts(dataset.tokens) == ["3"]


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_of_a_row_go_to_the_chat_template(prompts, as_text):
    prompts.tokenizer.chat_template = WITH_TOOLS
    other = {"type": "function", "function": {"name": "sub", "description": "minus"}}
    rows = [
        prompt_row(text) | {"tools": json.dumps(tools) if as_text and tools else tools}
        for text, tools in zip("abc", ([TOOL], [other], None), strict=True)
    ]
    assert prompts.texts(prompts(rows, form=PromptForm(tools_key="tools")).tokens) == [
        "[add['name', 'parameters']]<user>a<assistant>",
        "[sub['name', 'description']]<user>b<assistant>",
        "<user>c<assistant>",
    ]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_prompts_of_several_turns_with_calls(prompts):
    prompts.tokenizer.chat_template = WITH_TOOLS
    (asked, _, sure) = talk("1+1?", "", "sure?")
    added = {"role": "assistant", "content": None, "tool_calls": [call("add", a=1)]}
    taken = {"role": "assistant", "content": "x", "tool_calls": [call("sub", b=1)]}
    turns = [[asked, added, {"role": "tool", "content": "2"}, sure], [asked, taken, sure]]
    assert prompts.texts(prompts([prompt_row(each) for each in turns]).tokens) == [
        "<user>1+1?<assistant>add(['a'])<|im_end|><tool>2<user>sure?<assistant>",
        "<user>1+1?<assistant>xsub(['b'])<|im_end|><user>sure?<assistant>",
    ]


def test_demonstrations_with_tools(demonstrations):
    demonstrations.tokenizer.chat_template = WITH_TOOLS
    rows = [{"messages": talk("1+1?", "2"), "tools": json.dumps([TOOL])}]
    dataset = demonstrations(rows, tools_key="tools")
    assert demonstrations.texts(dataset.tokens)[0].startswith("[add[")
    learnt = dataset.tokens.row(0)[dataset.response_mask.row(0)]
    assert demonstrations.texts([learnt]) == ["2<|im_end|>"]


@pytest.mark.parametrize(("row", "form", "said"), [
    ({"answer": None}, {"answer_key": "answer"}, "row 0: answer is null, not an answer"),
    ({"tools": "add"}, {"tools_key": "tools"}, "row 0: tools: Expecting value"),
    ({"tools": '{"a": 1}'}, {"tools_key": "tools"}, "row 0: tools: not a list of JSON schemas but"),
    ({"rules": 3}, {"system_key": "rules"}, "row 0: rules: of type int, not text"),
    ({"rules": "r", "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
     {"system_key": "rules"}, "row 0: rules: not empty, but the prompt already has a system message"),
    ({"rules": "r", "prompt": [1, 2]}, {"system_key": "rules"}, "prompt: token ids"),
])  # fmt: skip
def test_rows_and_keys_that_do_not_fit_are_named(prompts, row, form, said):
    assert said in str(prompts.refused([prompt_row("a") | row], form=PromptForm(**form)))
    text = str(prompts.refused([prompt_row("a")], form=PromptForm(tools_key="tool")))
    assert "missing column 'tool'" in text and "data.tools_key" in text


def test_a_mixture_names_every_source(prompts):
    dataset = prompts([prompt_row("a", source=source) for source in ("x", "y", "x")])
    assert dataset.places_of_sources(("y", "x")).tolist() == [1, 0, 1]
    error = refused(DataError, lambda: dataset.places_of_sources(("x",)))
    assert (error.field, error.got) == ("data.mixture", "y")
