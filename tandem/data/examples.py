"""Forms of examples to learn from: what must stand in their rows, and which text the model reads and
learns; see `tandem.data.forms`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from tandem.data.chat import ChatTemplate, Message
from tandem.data.forms import tools_of, tools_problem
from tandem.data.tokens import Piece
from tandem.data.turns import examples
from tandem.data.validate import conversation_problem, kind, prompt_problem


@dataclass(frozen=True)
class ConversationForm:
    """Conversations whose assistant's turns are learnt.

    Attributes:
        key: the column.
        tools_key: the column of the tools that the template is given, if any.
    """

    key: str
    tools_key: str | None = None
    texts: ClassVar[bool] = False

    @property
    def told_by(self) -> tuple[str, ...]:
        return _present(self.key, self.tools_key)

    @property
    def expected(self) -> str:
        return f"{self.key}: [{{role, content}}, …] with a turn of the assistant that is not the first"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _of(self.key, turns_problem(row[self.key])) or tools_problem(row, self.tools_key)

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        return examples(template, row[self.key], tools_of(row.get(self.tools_key or "")))


@dataclass(frozen=True)
class PairForm:
    """Prompts with the responses to learn: text, or messages that follow a prompt of messages.

    Attributes:
        prompt_key, response_key: the columns.
        texts: whether the responses are texts.
        tools_key: the column of the tools that the template of messages is given, if any.
    """

    prompt_key: str
    response_key: str
    texts: bool = True
    tools_key: str | None = None

    @property
    def told_by(self) -> tuple[str, ...]:
        return _present(self.prompt_key, self.response_key, self.tools_key)

    @property
    def expected(self) -> str:
        messages = "[{role, content}, …]"
        if self.texts:
            return f"{self.prompt_key}: {messages} or text; {self.response_key}: text"
        return f"{self.prompt_key}: {messages}; {self.response_key}: {messages} with a turn of the assistant"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        prompt, response = row[self.prompt_key], row[self.response_key]
        wrong = _text_problem(response) if self.texts else _following_problem(prompt, response)
        told = _of(self.prompt_key, prompt_problem(prompt)) or _of(self.response_key, wrong)
        return told or tools_problem(row, self.tools_key)

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        prompt, response = row[self.prompt_key], row[self.response_key]
        tools = tools_of(row.get(self.tools_key or ""))
        if self.texts:
            return [[*template.prompt(prompt, tools), (response, True)]]
        return examples(template, [*prompt, *response], tools, prompt=len(prompt))


@dataclass(frozen=True)
class TextForm:
    """Texts of which everything is learnt, as in pretraining."""

    key: str
    texts: ClassVar[bool] = True

    @property
    def told_by(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def expected(self) -> str:
        return f"{self.key}: text"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _of(self.key, _text_problem(row[self.key]))

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        return [_all_learnt(template, row[self.key])]


@dataclass(frozen=True)
class PreferenceForm:
    """Pairs of answers, of which one is turned into tokens.

    Answers are texts, after a prompt or (without one) from the beginning; or messages, which are a whole
    conversation, or begin with the assistant's turn that follows a prompt of messages.

    Attributes:
        answers: the columns of both.
        prompt_key: the column of prompts; None: there is none.
        margin_key: the column of margins, if any.
        texts: whether the answers are texts.
        side: the column of the answer that becomes tokens.
    """

    answers: tuple[str, str]
    prompt_key: str | None
    margin_key: str | None
    texts: bool = True
    side: str = ""

    @property
    def told_by(self) -> tuple[str, ...]:
        return _present(self.prompt_key, *self.answers, self.margin_key)

    @property
    def expected(self) -> str:
        wanted = "text" if self.texts else "[{role, content}, …] that the assistant ends"
        prompt = "" if self.prompt_key is None else f"{self.prompt_key}: [{{role, content}}, …] or text; "
        margin = "" if self.margin_key is None else f"; {self.margin_key}: a number"
        return f"{prompt}{' and '.join(self.answers)}: {wanted}{margin}"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        if self.texts and self.prompt_key is not None and (wrong := prompt_problem(row[self.prompt_key])):
            return _of(self.prompt_key, wrong)
        for key in self.answers:
            if wrong := _text_problem(row[key]) if self.texts else self._messages_problem(row, row[key]):
                return _of(key, wrong)
        return _of(self.margin_key, _margin_problem(row[self.margin_key])) if self.margin_key else None

    def _messages_problem(self, row: Mapping[str, Any], answer: Any) -> str | None:
        follows = self._follows(answer)
        wrong = _following_problem(row[self.prompt_key or ""], answer) if follows else turns_problem(answer)
        ended = wrong or answer[-1]["role"] == "assistant"
        return wrong if ended else "the assistant does not have the last word"

    def _follows(self, answer: Any) -> bool:
        """Whether an answer of messages follows the prompt, and is no conversation of its own."""
        if self.prompt_key is None or conversation_problem(answer):
            return False
        return bool(answer[0]["role"] == "assistant")

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        answer = row[self.side]
        prompt = None if self.prompt_key is None else row[self.prompt_key]
        if self.texts:
            after = None if prompt is None else [*template.prompt(prompt), (answer, True)]
            return [after or _all_learnt(template, answer)]
        if prompt is None or not self._follows(answer):
            return [answered(template, answer)]
        return [answered(template, [*prompt, *answer], prompt=len(prompt))]


ExampleForm = ConversationForm | PairForm | TextForm | PreferenceForm


def _present(*keys: str | None) -> tuple[str, ...]:
    return tuple(key for key in keys if key is not None)


def _of(key: str, problem: str | None) -> str | None:
    return f"{key}: {problem}" if problem else None


def answered(template: ChatTemplate, messages: Sequence[Message], *, prompt: int = 0) -> list[Piece]:
    """A conversation up to the end of the assistant's last turn, as the model meets that. Raises as
    `tandem.data.turns.examples`.

    Args:
        prompt: how many messages at the beginning are the prompt.
    """
    pieces = examples(template, messages, prompt=prompt)[-1]
    last = max(place for place, (_, written) in enumerate(pieces) if written)
    return pieces[: last + 1]


def _all_learnt(template: ChatTemplate, text: str) -> list[Piece]:
    return [(piece, isinstance(piece, str)) for piece, _ in template.prompt(text)]


def turns_problem(messages: Any) -> str | None:
    """Names what keeps `messages` from being a conversation in which the assistant answers."""
    if problem := conversation_problem(messages):
        return problem
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        return "the assistant speaks first"
    return None if "assistant" in roles else "no turn of the assistant"


def _text_problem(answer: Any) -> str | None:
    return None if isinstance(answer, str) else f"{kind(answer)}, not text"


def _following_problem(prompt: Any, answer: Any) -> str | None:
    """Names what keeps the messages of an answer from following a prompt."""
    if problem := conversation_problem(answer):
        return problem
    if isinstance(prompt, str) or prompt_problem(prompt):
        return "messages, but the prompt is not"
    return None if any(turn["role"] == "assistant" for turn in answer) else "no turn of the assistant"


def _margin_problem(margin: Any) -> str | None:
    with suppress(ValueError):
        margin = float(margin) if isinstance(margin, str) else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        return f"{kind(margin)}, not a number"
    return None if math.isfinite(margin) else f"{margin}, not a finite number"
