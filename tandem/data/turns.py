"""Conversations to the examples of which the assistant's turns are learnt, each as the model meets it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tandem.data.chat import ChatTemplate, Message
from tandem.data.tokens import Piece

_OPEN = re.compile(r"<([^<>/\s]+)>\s*$")
"""Thinking that the generation prompt begins."""
_NONE = re.compile(r"<([^<>/\s]+)>\s*</\1>\s*$")
"""Thinking that it leaves out."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class _Example:
    """A text up to the end of an assistant's turn, and where in it what is learnt begins and ends."""

    text: str
    spans: tuple[tuple[int, int], ...]


def examples(
    template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None = None, *, prompt: int = 0
) -> list[list[Piece]]:
    """Return the examples of a conversation, each in pieces that end where what is learnt begins or ends.

    Each turn of the assistant follows what the template renders before it, with the generation prompt. A turn
    whose beginning an earlier example is shares one with it, so that most templates make one example of a
    conversation; those that change earlier turns, or leave out their reasoning, make several. What a turn
    holds is what the template marks by `generation`; without marks it is all from the generation prompt to
    the turn's end. Where the template ends no turn (GLM-4), that is the token that begins the next one, also
    after the last turn.

    Args:
        messages: the first is not the assistant's.
        tools: that the template is told of, as JSON schemas.
        prompt: how many messages at the beginning are the prompt, of which no turn is learnt.

    Raises:
        TemplateError: the template refuses the conversation.
        DataError: it renders a turn so that it does not follow what came before.
    """
    made: list[_Example] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place < prompt:
            continue
        so_far = messages[: place + 1]
        turn = _marked(template, so_far, tools) or _turn(template, so_far, tools, _follower(messages, place))
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
    """The last turn by the template's own marks; None where it has none."""
    text, marks = template.marked(messages, tools)
    if not marks:
        return None
    start = _shared(text, template.render(messages[:-1], tools=tools))
    spans = tuple(mark for mark in marks if mark[1] > start)
    return _Example(text[: spans[-1][1]], spans) if spans else None


def _turn(
    template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None, follower: str
) -> _Example:
    """The last turn, from the generation prompt to its end; a message of the role `follower` follows."""
    prompt = template.render(messages[:-1], generation_prompt=True, tools=tools)
    written = _written(template, prompt, messages, tools)
    if not written:
        raise template.unfit(f"it leaves out the response, message {len(messages) - 1}")
    text = prompt + _ended(template, written, follower)
    return _Example(text, ((len(prompt), len(text)),))


def _written(
    template: ChatTemplate, prompt: str, messages: Sequence[Message], tools: list[Any] | None
) -> str:
    """What the model writes after the prompt, and what the template puts there."""
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
        thought = _thought(messages[-1], opening, closing).strip("\n")
        return f"{thought}\n{closing}\n\n" + rest.lstrip("\n")
    shared = _shared(whole, prompt)
    if shared < _shared(prompt, template.render(messages[:-1], tools=tools)):
        raise template.unfit(f"it changes the first {len(messages) - 1} message(s) once others follow")
    return whole[shared:]


def _shared(first: str, second: str) -> int:
    """The length of what two texts begin with alike."""
    differ = (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differ, min(len(first), len(second)))


def _thought(message: Mapping[str, Any], opening: str, closing: str) -> str:
    """The reasoning of a turn."""
    named = [message[name] for name in _REASONING if isinstance(message.get(name), str)]
    before, found, _ = str(message.get("content") or "").partition(closing)
    return named[0] if named else before.rpartition(opening)[2] if found else ""


def _follower(messages: Sequence[Message], place: int) -> str:
    """The role of what follows a message: who is next, or would be."""
    if place + 1 < len(messages):
        return str(messages[place + 1]["role"])
    return "tool" if messages[place].get("tool_calls") else "user"


def _ended(template: ChatTemplate, written: str, follower: str) -> str:
    """A turn up to its end: the end-of-sequence token, another that ends it, or what begins the next turn,
    where the template has no other end."""
    if template.eos and template.eos in written:  # the model stops at the first
        return written[: written.index(template.eos) + len(template.eos)]
    turn = written.rstrip()
    if any(turn.endswith(marker) and (special or marker[:2] != "</") for marker, special in template.markers):
        return turn
    return written + template.beginning(follower)
