"""Chat templates with the quirks of real ones: the text before each turn, and the learned part of it."""

from itertools import pairwise

import pytest

from tandem.data.chat import ChatTemplate
from tandem.data.encoder import TEMPLATE, Encoder
from tandem.data.examples import ConversationForm, PreferenceForm
from tandem.data.truncation import Limit
from tandem.data.turns import examples
from tandem.errors import DataError
from tests.data.cases import talk
from tests.support.refusing import refused
from tests.support.tokenizers import KINDS, byte_level

END = "<|end|>"
MARKERS = ["<|user|>", "<|assistant|>", "<|tool|>", "<|stop|>"]
LOOP = "{% for m in messages %}"
ROLE = "{{ '<|' + m.role + '|>' }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
CLOSE = "{% endif %}"
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}]

PLAIN = LOOP + ROLE + "{{ m.content + eos_token }}" + PROMPT + CLOSE
ANSWER = "{% set c = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
BEGUN = LOOP + ROLE + ANSWER + "{{ c + eos_token }}" + PROMPT + "{{ '<think>\n' }}" + CLOSE
EMPTIED = (
    LOOP + ROLE + ANSWER + "{% if m.role == 'assistant' %}{% if loop.last and '</think>' in m.content %}"
    "{{ m.content + eos_token }}{% else %}{{ '<think></think>' + c + eos_token }}{% endif %}"
    "{% else %}{{ c + eos_token }}{% endif %}" + PROMPT + "{{ '<think>\n' }}" + CLOSE
)
NO_THINK = "{% if no_think is defined %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
LATER = LOOP + ROLE + ANSWER + "{{ (m.content if loop.last else c) + eos_token }}" + PROMPT + NO_THINK + CLOSE
TRIMMED = "{{ '\n' + m.content | trim + '<|stop|>\n' }}"
CLOSED = LOOP + ROLE + TRIMMED + PROMPT + "{{ '\n' }}{% else %}{{ eos_token }}" + CLOSE
OPEN = (
    LOOP + ROLE + "{{ '\n' + m.content }}{% for call in m.tool_calls or [] %}{{ '<tool_call>f</tool_call>' }}"
    "{% endfor %}" + PROMPT + CLOSE
)
BETWEEN = (
    LOOP + "{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content }}"
    "{% if not loop.last %}{{ '\n<|stop|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|stop|>A: ' }}" + CLOSE
)
PRESET = "{% if messages[0].role != 'system' %}{{ '<|system|>Be kind.' }}{% endif %}" + PLAIN
MARKED = (
    LOOP + ROLE + "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|stop|>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}" + PROMPT + CLOSE
)
PARTS = (
    LOOP + ROLE + "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ eos_token }}" + PROMPT + CLOSE
)
TEMPLATES = {
    "plain": PLAIN, "begun": BEGUN, "emptied": EMPTIED, "later": LATER, "closed": CLOSED, "preset": PRESET,
    "marked": MARKED, "parts": PARTS, "open": OPEN, "between": BETWEEN,
}  # fmt: skip


WHOLE = ConversationForm("m")


def encoder(tokenizer, form=WHOLE):
    return Encoder(form, tokenizer, ChatTemplate(tokenizer, None), Limit(99999, ""), learnt=True)


def shown(source, messages, **options):
    template = ChatTemplate(byte_level(MARKERS, source), options)
    return [["*" * learnt + str(text) for text, learnt in each] for each in examples(template, messages)]


U, A = "<|user|>", "<|assistant|>"
THOUGHT = talk("1?", "<think>\nhm\n</think>\n\n2", "3?", "<think>\noh\n</think>\n\n4")


def test_a_template_that_keeps_what_was_makes_one_example():
    assert shown(PLAIN, talk("1?", "2", "3?", "4", "5?")) == [
        [f"{U}1?{END}{A}", f"*2{END}", f"{U}3?{END}{A}", f"*4{END}", f"{U}5?{END}"]
    ]
    assert shown(PRESET, talk("1?", "2"))[0][0] == f"<|system|>Be kind.{U}1?{END}{A}"


def test_reasoning_that_the_prompt_begins_is_gone_on_with():
    """The rendered turn has no reasoning, but the generation prompt starts it."""
    first = f"{U}1?{END}{A}"
    assert shown(BEGUN, THOUGHT) == [
        [first + "<think>\n", f"*hm\n</think>\n\n2{END}"],
        [f"{first}\n\n2{END}{U}3?{END}{A}<think>\n", f"*oh\n</think>\n\n4{END}"],
    ]
    assert shown(BEGUN, talk("1?", "<b>2</b>")) == [[first + "<think>\n", f"*\n</think>\n\n<b>2</b>{END}"]]
    fields = [THOUGHT[0], {"role": "assistant", "content": "2", "reasoning_content": "hm"}]
    assert shown(BEGUN, fields) == [[first + "<think>\n", f"*hm\n</think>\n\n2{END}"]]
    assert shown(EMPTIED, talk("1?", "2")) == [[first + "<think>\n", f"*</think>2{END}"]]
    assert shown(EMPTIED, THOUGHT)[0] == [first + "<think>\n", f"*hm\n</think>\n\n2{END}"]


def test_reasoning_that_later_turns_lack_is_learnt_where_it_stands():
    first = f"{U}1?{END}{A}"
    assert shown(LATER, THOUGHT) == [
        [first, f"*<think>\nhm\n</think>\n\n2{END}"],
        [f"{first}\n\n2{END}{U}3?{END}{A}", f"*<think>\noh\n</think>\n\n4{END}"],
    ]
    without = [first + "<think>\n\n</think>\n\n", f"*2{END}"]
    assert shown(LATER, THOUGHT[:2], no_think=True) == [without]
    assert shown(LATER, talk("1?", "2"), no_think=True) == [without]


def test_what_follows_the_end_only_at_the_last_turn_is_not_in_the_others():
    assert shown(CLOSED, talk("1?", " 2 ", "3?", "4")) == [
        [f"{U}\n1?<|stop|>\n{A}\n", f"*2<|stop|>\n{END}"],
        [f"{U}\n1?<|stop|>\n{A}\n2<|stop|>\n{U}\n3?<|stop|>\n{A}\n", f"*4<|stop|>\n{END}"],
    ]
    stopping = byte_level(MARKERS, CLOSED)
    stopping.eos_token = "<|stop|>"
    (only,) = examples(ChatTemplate(stopping, None), talk("1?", "2", "3?", "4"))
    assert [text for text, learnt in only if learnt] == ["2<|stop|>", "4<|stop|>"]


def test_a_turn_that_nothing_ends_is_ended_by_the_token_that_begins_the_next():
    """The last turn ends with the token of the next speaker too: the model stops there and must learn it."""
    assert shown(OPEN, talk("1?", "2", "3?", "4")) == [[f"{U}\n1?{A}", f"*\n2{U}", f"\n3?{A}", f"*\n4{U}"]]
    called = [*talk("1?"), {"role": "assistant", "content": "", "tool_calls": CALL}]
    answered = [*called, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "3"}]
    call = "*\n<tool_call>f</tool_call><|tool|>"
    assert shown(OPEN, called) == [[f"{U}\n1?{A}", call]]
    assert shown(OPEN, answered) == [[f"{U}\n1?{A}", call, f"\n2{A}", f"*\n3{U}"]]
    assert shown(BETWEEN, talk("1?", "2", "3?", "4")) == [
        ["Q: 1?\n<|stop|>A: ", "*2\n<|stop|>", "Q: 3?\n<|stop|>A: ", "*4\n<|stop|>"]
    ]


def test_marks_of_the_template_say_what_is_learnt():
    messages = talk("1?", "2", "3?", "4", "5?")
    tokenizer = byte_level(MARKERS, MARKED)
    part = encoder(tokenizer).part([{"m": messages}], [0])
    marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert part.ids.tolist() == marked["input_ids"]
    assert part.masks.astype(int).tolist() == marked["assistant_masks"]


def test_a_template_of_parts_is_given_parts():
    assert shown(PARTS, talk("1?", "2")) == [[f"{U}1?{END}{A}", f"*2{END}"]]
    assert ChatTemplate(byte_level(MARKERS, PARTS), None).prompt(talk("1?")) == [(f"{U}1?{END}{A}", False)]


@pytest.mark.parametrize("arguments", [{"x": "é"}, '{"x": "é"}'])
def test_arguments_of_calls_are_given_as_the_template_wants_them(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*talk("1?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    calls = "{% for call in m.tool_calls or [] %}{% set given = call.function.arguments %}"
    text = PLAIN.replace("{{ m.content", calls + "{{ 'f' + given }}{% endfor %}{{ m.content")
    assert shown(text, messages)[0][1] == f'*f{{"x": "é"}}{END}'
    pairs = "{% for name, value in given.items() %}{{ name + value }}{% endfor %}{% endfor %}{{ m.content"
    assert shown(PLAIN.replace("{{ m.content", calls + pairs), messages)[0][1] == f"*xé{END}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_turn_follows_what_the_model_meets(name, kind):
    follows_prompts(KINDS[kind](MARKERS, TEMPLATES[name]), THOUGHT)


def follows_prompts(tokenizer, messages):
    template = ChatTemplate(tokenizer, None)
    part = encoder(tokenizer).part([{"m": messages}], [7])
    assert not part.problems and part.error is None and set(part.rows.tolist()) == {7}
    starts = [0, *part.lengths.cumsum().tolist()]
    sequences = [(part.ids[a:b].tolist(), part.masks[a:b].tolist()) for a, b in pairwise(starts)]
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    begun = sum(mask[at] and not mask[at - 1] for _, mask in sequences for at in range(1, len(mask)))
    assert begun == len(turns)
    for turn in turns:
        prompt = template.prompt(messages[:turn])
        met = tokenizer(prompt[0][0], add_special_tokens=False)["input_ids"]
        there = [mask[len(met) - 1 : len(met) + 1] for ids, mask in sequences if ids[: len(met)] == met]
        assert [False, True] in there
    pair = PreferenceForm(("m", "m"), None, None, texts=False, side="m")
    last = encoder(tokenizer, pair).part([{"m": messages}], [0])
    ids, mask = sequences[-1]
    assert last.ids.tolist() == ids[: len(last.ids)] and last.masks[-1] and not any(mask[len(last.ids) :])


def test_a_template_that_changes_what_was_is_blamed_and_one_that_refuses_a_row_is_not():
    counting = "{{ messages | length }}" + PLAIN
    error = refused(DataError, lambda: shown(counting, talk("1?", "2")), "changes the first 1 message")
    assert error.field == "tokenizer.chat_template"
    with pytest.raises(DataError, match="omits the response, message 1"):
        shown(PLAIN.replace("m.content + eos_token", "'' if m.role == 'assistant' else 1"), talk("1?", "2"))
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    tokenizer = byte_level(MARKERS, strict)
    rows = [{"m": [{"role": "system", "content": "x"}, *talk("1?", "2")]}, {"m": talk("1?", "2")}]
    part = encoder(tokenizer).part(rows, [0, 1])
    assert part.problems[TEMPLATE] == [(0, "no system")] and part.error is None
