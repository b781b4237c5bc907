"""Convert a conversation to training examples in which the model learns the assistant's turns.

Each example has exactly the text that the model sees during generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.data.chat import ChatTemplate, Message
from tandem.data.tokens import Piece

_OPEN = re.compile(r"<([^<>/\s]+)>\s*$")
"""A tag at the end of the generation prompt that starts the model's reasoning."""
_NONE = re.compile(r"<([^<>/\s]+)>\s*</\1>\s*$")
"""An empty pair of tags at the end of the generation prompt, which means that there is no reasoning."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class _Example:
    """A text up to the end of an assistant's turn, and the spans in it that the model learns."""

    text: str
    spans: tuple[tuple[int, int], ...]


def examples(
    template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: int = 0
) -> list[list[Piece]]:
    """Return the examples of a conversation. Each example is split where the text to learn starts or ends.

    Each turn of the assistant follows the text that the template renders before it, with the generation
    prompt. If an earlier example is the beginning of a later turn's text, both share one example. So most
    templates give one example per conversation. Templates that change earlier turns or remove their reasoning
    give several.

    The template's `generation` marks determine which text of a turn the model learns. Without marks, the
    model learns the text from the generation prompt to the end of the turn. Some templates, such as GLM-4,
    have no token that ends a turn. With such a template, a turn ends with the token that starts the next
    turn, also after the last turn.

    Args:
        template: The chat template.
        messages: The conversation. The first message is not an assistant's message.
        tools: JSON schemas of the tools for the template.
        prompt: The number of messages at the start that form the prompt. The model learns no turn of the
            prompt.

    Raises:
        TemplateError: The template rejects the conversation.
        DataError: The template renders a turn so that it does not follow the text before it.
    """
    made: list[_Example] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place < prompt:
            continue
        so_far = messages[: place + 1]
        turn = _marked(template, so_far, tools) or _turn(template, so_far, tools, _next_role(messages, place))
        if made and turn.text.startswith(made[-1].text) and turn.spans[0][0] >= len(made[-1].text):
            turn = _Example(turn.text, (*made.pop().spans, *turn.spans))
        made.append(turn)
    whole = template.render(messages, tools=tools)
    if whole.startswith(made[-1].text):
        made[-1] = _Example(whole, made[-1].spans)
    return [_pieces(example) for example in made]


def _pieces(example: _Example) -> list[Piece]:
    cuts = [0, *(place for span in example.spans for place in span), len(example.text)]
    parts = [(example.text[start:end], at % 2 == 1) for at, (start, end) in enumerate(pairwise(cuts))]
    return [part for part in parts if part[0]]


def _marked(template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None) -> _Example | None:
    """Return the last turn according to the template's `generation` marks; None without such marks."""
    text, marks = template.marked(messages, tools)
    if not marks:
        return None
    start = _shared(text, template.render(messages[:-1], tools=tools))
    spans = tuple(mark for mark in marks if mark[1] > start)
    return _Example(text[: spans[-1][1]], spans) if spans else None


def _turn(
    template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None, follower: str
) -> _Example:
    """Return the last turn, from the generation prompt to the end of the turn.

    `follower` is the role of the next message.
    """
    prompt = template.render(messages[:-1], generation_prompt=True, tools=tools)
    written = _written(template, prompt, messages, tools)
    if not written:
        raise template.unfit(f"it omits the response, message {len(messages) - 1}")
    text = prompt + _up_to_end(template, written, follower)
    return _Example(text, ((len(prompt), len(text)),))


def _written(
    template: ChatTemplate, prompt: str, messages: Sequence[Message], tools: list[Any] | None
) -> str:
    """Return the text that follows the prompt in the rendered conversation."""
    whole = template.render(messages, tools=tools)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    if (found := _NONE.search(prompt)) and whole.startswith(prompt[: found.start()]):
        rest = whole[found.start() :]
        return rest.partition(f"</{found[1]}>")[2].lstrip("\n") if rest.startswith(f"<{found[1]}>") else rest
    if (found := _OPEN.search(prompt)) and whole.startswith(prompt[: found.start()]):
        rest, opening, closing = whole[found.start() :], f"<{found[1]}>", f"</{found[1]}>"
        if rest.startswith(opening):
            return rest.removeprefix(opening)
        thought = _reasoning_of(messages[-1], opening, closing).strip("\n")
        return f"{thought}\n{closing}\n\n" + rest.lstrip("\n")
    shared = _shared(whole, prompt)
    if shared < _shared(prompt, template.render(messages[:-1], tools=tools)):
        raise template.unfit(
            f"it changes the first {len(messages) - 1} message(s) when other messages follow"
        )
    return whole[shared:]


def _shared(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts."""
    differ = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differ, min(len(first), len(second)))


def _reasoning_of(message: Mapping[str, Any], opening: str, closing: str) -> str:
    """Return the reasoning of a turn."""
    named = [message[name] for name in _REASONING if isinstance(message.get(name), str)]
    before, found, _ = str(message.get("content") or "").partition(closing)
    return named[0] if named else before.rpartition(opening)[2] if found else ""


def _next_role(messages: Sequence[Message], place: int) -> str:
    """Return the role of the next message, or the role that would be expected next."""
    if place + 1 < len(messages):
        return str(messages[place + 1]["role"])
    return "tool" if messages[place].get("tool_calls") else "user"


def _up_to_end(template: ChatTemplate, written: str, follower: str) -> str:
    """Return a turn up to its end.

    The end is the end-of-sequence token or another token that ends the turn. If the template has no such
    token, the end is the token that starts the next turn.
    """
    if template.eos and template.eos in written:  # the model stops at the first
        return written[: written.index(template.eos) + len(template.eos)]
    turn = written.rstrip()
    if any(turn.endswith(marker) and (special or marker[:2] != "</") for marker, special in template.markers):
        return turn
    return written + template.beginning(follower)
