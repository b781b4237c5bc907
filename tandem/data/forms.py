"""Forms of rows: what must stand in them, and which text the model reads; see `tandem.data.encoder.Form`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from tandem.data.chat import ChatTemplate, Message, plain
from tandem.data.tokens import Piece
from tandem.data.turns import examples
from tandem.data.validate import conversation_problem, kind, prompt_problem, reward_problem
from tandem.texts import parse_json

UNNAMED = "data"
"""The data source of rows that name none, for metrics."""
RESERVED = ("response", "responses")
"""Names of what the policy writes, in reward functions that read columns by name. Columns of the names that
TRL has for it are not given to the function, as in TRL."""
PARAMETERS = "the parameters or arguments of your reward function"
"""What else names columns."""


@dataclass(frozen=True)
class PromptForm:
    """Prompts to answer, with what their reward reads.

    Attributes:
        prompt_key: the column of prompts, each a list of {role, content} (formatted with the tokenizer's chat
            template), a text (taken as already formatted), or a list of token ids.
        apply_chat_template: a text is what the user says, and is formatted too.
        system_key, tools_key: the columns of what stands before the first message, and of the tools that the
            template is given (a list of JSON schemas, or that as JSON), if any.
        answer_key: the column of what the reward knows as the ground truth, if it is not in `reward_model`.
        reward_fn_key: the column of data sources; it may be missing where there is an answer_key.
        needs: the columns that the reward reads; None: there is no reward.
        beside: further columns that must be there.
        media_keys: columns that must be empty, where they are there: of images, videos, sounds.
        as_ids: the prompts are token ids.
    """

    prompt_key: str = "prompt"
    apply_chat_template: bool = False
    system_key: str | None = None
    tools_key: str | None = None
    answer_key: str | None = None
    reward_fn_key: str = "data_source"
    needs: tuple[str, ...] | None = ("data_source", "reward_model")
    beside: tuple[str, ...] = ()
    media_keys: tuple[str, ...] = ()
    as_ids: bool = False

    columns = None

    @property
    def told_by(self) -> tuple[str, ...]:
        return (self.prompt_key,)

    @property
    def scored(self) -> bool:
        """Whether the reward reads data source and ground truth."""
        return self.needs is not None and "reward_model" in self.needs

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that must be there."""
        stand_in = {"prompt": None, "data_source": self.reward_fn_key}
        if self.answer_key is not None:
            stand_in |= {"reward_model": self.answer_key, "data_source": None}
        names = (stand_in.get(name, name) for name in (*(self.needs or ()), *self.beside))
        return tuple(
            dict.fromkeys(
                name
                for name in (self.prompt_key, *names, self.system_key, self.tools_key)
                if name is not None
            )
        )

    @property
    def expected(self) -> str:
        """The shape of a row, in words."""
        parts = [f"{self.prompt_key}: [{{role, content}}, …], text, or token ids"]
        if self.scored and self.answer_key is None:
            parts += [f"{self.reward_fn_key}: a name; reward_model: {{style, ground_truth}}"]
            parts += ["extra_info: a mapping, if any"]
        if self.answer_key is not None:
            parts.append(f"{self.answer_key}: an answer")
        if self.tools_key is not None:
            parts.append(f"{self.tools_key}: a list of JSON schemas, or that as JSON")
        return "; ".join(parts)

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row, None if nothing is."""
        found = _ids_problem if self.as_ids else prompt_problem
        if wrong := found(row[self.prompt_key]):
            return f"{self.prompt_key}: {wrong}"
        if held := [key for key in self.media_keys if row.get(key)]:
            return f"{held[0]}: not empty; models of text alone are trained"
        return self._beside_problem(row) or self._reward_problem(row)

    def _beside_problem(self, row: Mapping[str, Any]) -> str | None:
        system = None if self.system_key is None else row[self.system_key]
        if system is not None and not isinstance(system, str):
            return f"{self.system_key}: {kind(system)}, not text"
        if (system or self.tools_key) and self.as_ids:
            return f"{self.prompt_key}: token ids, before which nothing is put"
        prompt = row[self.prompt_key]
        if system and not isinstance(prompt, str) and prompt[0]["role"] == "system":
            return f"{self.system_key}: not empty, and the prompt has a system message already"
        return _tools_problem(row, self.tools_key)

    def _reward_problem(self, row: Mapping[str, Any]) -> str | None:
        if self.answer_key is not None and row[self.answer_key] is None:
            return f"{self.answer_key} is null, not an answer"
        if self.scored:
            return None if self.answer_key is not None else reward_problem(row, self.reward_fn_key)
        reserved = RESERVED if self.prompt_key == "prompt" else ("prompt", *RESERVED)
        held = [] if self.needs is None else [name for name in reserved if name in row]
        meaning = "as what a reward function is given beside columns"
        return f"a column is named {held[0]}, {meaning}" if held else None

    def tools(self, row: Mapping[str, Any]) -> list[Any] | None:
        """The tools of a row.

        Raises:
            ValueError: no list of them.
        """
        given = None if self.tools_key is None else row[self.tools_key]
        return tools_of(given)

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The prompt as messages: for text already formatted one without a role, none for token ids."""
        prompt = row[self.prompt_key]
        system = row.get(self.system_key) if self.system_key is not None else None
        if isinstance(prompt, str):
            formatted = not (self.apply_chat_template or system or self.tools_key)
            messages: list[Message] = [{"role": "" if formatted else "user", "content": prompt}]
        else:
            messages = plain(prompt) if isinstance(prompt[0], Mapping) else []
        return [{"role": "system", "content": system}, *messages] if system else messages

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        """See `tandem.data.encoder.Form`."""
        messages = self.messages(row)
        if not messages:
            return [[(row[self.prompt_key], False)]]
        if not messages[0]["role"]:
            return [template.prompt(messages[0]["content"])]
        return [template.prompt(messages, self.tools(row))]

    def source(self, row: Mapping[str, Any]) -> str:
        """The data source."""
        return row.get(self.reward_fn_key) or UNNAMED

    def truth(self, row: Mapping[str, Any]) -> Any:
        """The ground truth, None where there is none."""
        return (
            row[self.answer_key] if self.answer_key else (row.get("reward_model") or {}).get("ground_truth")
        )


def tools_of(given: Any) -> list[Any] | None:
    """Tools as a template takes them, of a list or its JSON; None where there are none.

    Raises:
        ValueError: no list of mappings.
    """
    tools = parse_json(given) if isinstance(given, str) and given.strip() else given
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"not a list of JSON schemas but {kind(tools)}")
    return [plain(tool) for tool in tools]


def _ids_problem(value: Any) -> str | None:
    if not value or None in value:
        return "not a list of at least one token id"
    return None if min(value) >= 0 else f"a negative token id, {min(value)}"


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
    def columns(self) -> tuple[str, ...]:
        return (self.key,) if self.tools_key is None else (self.key, self.tools_key)

    told_by = columns

    @property
    def expected(self) -> str:
        return f"{self.key}: [{{role, content}}, …] with a turn of the assistant that is not the first"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        if problem := turns_problem(row[self.key]):
            return f"{self.key}: {problem}"
        return _tools_problem(row, self.tools_key)

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
    def columns(self) -> tuple[str, ...]:
        tools = () if self.tools_key is None else (self.tools_key,)
        return self.prompt_key, self.response_key, *tools

    told_by = columns

    @property
    def expected(self) -> str:
        if self.texts:
            return f"{self.prompt_key}: [{{role, content}}, …] or text; {self.response_key}: text"
        turn = "with a turn of the assistant"
        return (
            f"{self.prompt_key}: [{{role, content}}, …]; {self.response_key}: [{{role, content}}, …] {turn}"
        )

    def problem(self, row: Mapping[str, Any]) -> str | None:
        prompt, response = row[self.prompt_key], row[self.response_key]
        if wrong := prompt_problem(prompt):
            return f"{self.prompt_key}: {wrong}"
        wrong = _text_problem(response) if self.texts else _following_problem(prompt, response)
        return f"{self.response_key}: {wrong}" if wrong else _tools_problem(row, self.tools_key)

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
    def columns(self) -> tuple[str, ...]:
        return (self.key,)

    told_by = columns

    @property
    def expected(self) -> str:
        return f"{self.key}: text"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        wrong = _text_problem(row[self.key])
        return f"{self.key}: {wrong}" if wrong else None

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
    def columns(self) -> tuple[str, ...]:
        named = (self.prompt_key, *self.answers, self.margin_key)
        return tuple(name for name in named if name is not None)

    told_by = columns

    @property
    def expected(self) -> str:
        wanted = "text" if self.texts else "[{role, content}, …] that the assistant ends"
        prompt = "" if self.prompt_key is None else f"{self.prompt_key}: [{{role, content}}, …] or text; "
        margin = "" if self.margin_key is None else f"; {self.margin_key}: a number"
        return f"{prompt}{' and '.join(self.answers)}: {wanted}{margin}"

    def problem(self, row: Mapping[str, Any]) -> str | None:
        if self.texts and self.prompt_key is not None and (wrong := prompt_problem(row[self.prompt_key])):
            return f"{self.prompt_key}: {wrong}"
        for key in self.answers:
            if wrong := _text_problem(row[key]) if self.texts else self._messages_problem(row, row[key]):
                return f"{key}: {wrong}"
        return None if self.margin_key is None else _margin_problem(self.margin_key, row[self.margin_key])

    def _messages_problem(self, row: Mapping[str, Any], answer: Any) -> str | None:
        if not self._follows(answer):
            wrong = turns_problem(answer)
        else:
            wrong = _following_problem(row[self.prompt_key or ""], answer)
        if wrong:
            return wrong
        return None if answer[-1]["role"] == "assistant" else "the assistant does not have the last word"

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


def _tools_problem(row: Mapping[str, Any], key: str | None) -> str | None:
    try:
        tools_of(row.get(key or ""))
    except ValueError as error:
        return f"{key}: {error}"
    return None


def _margin_problem(key: str, margin: Any) -> str | None:
    with suppress(ValueError):
        margin = float(margin) if isinstance(margin, str) else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        return f"{key}: {kind(margin)}, not a number"
    return None if math.isfinite(margin) else f"{key}: {margin}, not a finite number"
