"""Forms of training examples. A form defines the columns of a row, and the text that the model learns.

`tandem.data.forms` describes the interface of a form.
"""

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
    """The form of conversations in which the model learns the assistant's turns.

    Attributes:
        key: The column of conversations.
        tools_key: The column of tools for the chat template, if the data has such a column.
    """

    key: str
    tools_key: str | None = None
    texts: ClassVar[bool] = False

    @property
    def identifying_columns(self) -> tuple[str, ...]:
        return _present(self.key, self.tools_key)

    @property
    def expected(self) -> str:
        return f"{self.key}: [{{role, content}}, …] with a turn of the assistant after the first message"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _of(self.key, turns_problem(row[self.key])) or tools_problem(row, self.tools_key)

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        return examples(template, row[self.key], tools_of(row.get(self.tools_key or "")))


@dataclass(frozen=True)
class PairForm:
    """The form of prompts with responses, which the model learns.

    A response is text, or messages that follow a prompt of messages.

    Attributes:
        prompt_key: The column of prompts.
        response_key: The column of responses.
        texts: Whether the responses are texts.
        tools_key: The column of tools for the chat template, if the data has such a column.
    """

    prompt_key: str
    response_key: str
    texts: bool = True
    tools_key: str | None = None

    @property
    def identifying_columns(self) -> tuple[str, ...]:
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
    """The form of texts that the model learns completely, as in pretraining."""

    key: str
    texts: ClassVar[bool] = True

    @property
    def identifying_columns(self) -> tuple[str, ...]:
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
    """The form of preference pairs. An instance converts one response of each pair to tokens.

    A response can be a text, which follows the prompt or, without a prompt, is the whole sequence. A response
    can also be a list of messages: a whole conversation, or messages that start with the assistant's turn and
    follow a prompt of messages.

    Attributes:
        answers: The columns of the two responses.
        prompt_key: The column of prompts; None: the data has no prompts.
        margin_key: The column of margins, if the data has such a column.
        texts: Whether the responses are texts.
        side: The column of the response that is converted to tokens.
    """

    answers: tuple[str, str]
    prompt_key: str | None
    margin_key: str | None
    texts: bool = True
    side: str = ""

    @property
    def identifying_columns(self) -> tuple[str, ...]:
        return _present(self.prompt_key, *self.answers, self.margin_key)

    @property
    def expected(self) -> str:
        wanted = "text" if self.texts else "[{role, content}, …] with a last message of the assistant"
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
        return wrong if ended else "the last message is not the assistant's"

    def _follows(self, answer: Any) -> bool:
        """Return whether a list of messages continues the prompt instead of being a whole conversation."""
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
    """Return a conversation as `Piece`s, up to the end of the assistant's last turn.

    Raises the errors of `tandem.data.turns.examples`.

    Args:
        template: The chat template.
        messages: The conversation.
        prompt: The number of messages at the start that form the prompt.
    """
    pieces = examples(template, messages, prompt=prompt)[-1]
    last = max(place for place, (_, written) in enumerate(pieces) if written)
    return pieces[: last + 1]


def _all_learnt(template: ChatTemplate, text: str) -> list[Piece]:
    return [(piece, isinstance(piece, str)) for piece, _ in template.prompt(text)]


def turns_problem(messages: Any) -> str | None:
    """Return why `messages` is not a conversation with an assistant's turn; None if it is valid."""
    if problem := conversation_problem(messages):
        return problem
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        return "the first message is the assistant's"
    return None if "assistant" in roles else "no turn of the assistant"


def _text_problem(answer: Any) -> str | None:
    return None if isinstance(answer, str) else f"{kind(answer)}, not text"


def _following_problem(prompt: Any, answer: Any) -> str | None:
    """Return why the messages of a response cannot follow the prompt; None if they are valid."""
    if problem := conversation_problem(answer):
        return problem
    if isinstance(prompt, str) or prompt_problem(prompt):
        return "a list of messages, but the prompt is not"
    return None if any(turn["role"] == "assistant" for turn in answer) else "no turn of the assistant"


def _margin_problem(margin: Any) -> str | None:
    with suppress(ValueError):
        margin = float(margin) if isinstance(margin, str) else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        return f"{kind(margin)}, not a number"
    return None if math.isfinite(margin) else f"{margin}, not a finite number"
