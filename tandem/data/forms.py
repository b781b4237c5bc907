"""The form of prompts: what must stand in their rows, and which text the model reads.

A form, also one of `tandem.data.examples`, says what is done with the rows of a use. `told_by` names the
columns that tell a row from others, `expected` the shape of a row in words, `problem` what is wrong with a
row, and `pieces` the texts, or the token ids, of the sequences that a row becomes. Each piece that is to be
learnt begins where the model's answer does; see `tandem.data.tokens.encoded`. A form goes to other processes,
and its `repr` says all that its results depend on beside tokenizer and template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.chat import ChatTemplate, Message, plain
from tandem.data.tokens import Piece
from tandem.data.validate import kind, prompt_problem, reward_problem
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
        wanted = (self.prompt_key, *names, self.system_key, self.tools_key)
        return tuple(dict.fromkeys(name for name in wanted if name is not None))

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
        return tools_problem(row, self.tools_key)

    def _reward_problem(self, row: Mapping[str, Any]) -> str | None:
        if self.answer_key is not None and row[self.answer_key] is None:
            return f"{self.answer_key} is null, not an answer"
        if self.scored:
            return None if self.answer_key is not None else reward_problem(row, self.reward_fn_key)
        reserved = RESERVED if self.prompt_key == "prompt" else ("prompt", *RESERVED)
        for name in () if self.needs is None else reserved:
            if name in row:
                return f"a column is named {name}, as what a reward function is given beside columns"
        return None

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
        """Return the pieces of the only sequence of a row.

        Raises:
            TemplateError: the template refuses the row.
        """
        messages = self.messages(row)
        if not messages:
            return [[(row[self.prompt_key], False)]]
        if not messages[0]["role"]:
            return [template.prompt(messages[0]["content"])]
        return [template.prompt(messages, tools_of(row.get(self.tools_key or "")))]

    def source(self, row: Mapping[str, Any]) -> str:
        """The data source."""
        return row.get(self.reward_fn_key) or UNNAMED

    def truth(self, row: Mapping[str, Any]) -> Any:
        """The ground truth, None where there is none."""
        if self.answer_key:
            return row[self.answer_key]
        return (row.get("reward_model") or {}).get("ground_truth")


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


def tools_problem(row: Mapping[str, Any], key: str | None) -> str | None:
    try:
        tools_of(row.get(key or ""))
    except ValueError as error:
        return f"{key}: {error}"
    return None
