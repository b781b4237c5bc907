"""The form of prompts: it defines the columns of a row, and the text that the model reads.

A form checks the rows of a dataset for one purpose and converts rows to text. The forms of training examples
are in `tandem.data.examples`. Every form has these members:

- `identifying_columns`: the columns that identify a row.
- `expected`: a description of a valid row.
- `problem`: the problem of a row, or None.
- `pieces`: the texts or token ids of a row's sequences. In each sequence, the text to learn starts where the
  model's response starts; see `tandem.data.tokens.encoded`.

A form is picklable. Its `repr` contains all settings that affect its results, except tokenizer and template,
because the cache uses the `repr` as a key.
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
"""The data source, for metrics, of rows without a data source."""
RESERVED = ("response", "responses")
"""Column names that reward functions use for the model's responses.

TRL uses these names for the model's responses too. As in TRL, data columns with these names are not passed to
the reward function.
"""
PARAMETERS = "the parameters or arguments of your reward function"
"""A text for messages about other origins of column names."""


@dataclass(frozen=True)
class PromptForm:
    """The form of prompts, with the columns that the reward reads.

    Attributes:
        prompt_key: The column of prompts. A prompt is a list of {role, content}, which the tokenizer's chat
            template formats; a text, which counts as already formatted; or a list of token ids.
        apply_chat_template: Whether a text prompt is a user's message, which the template formats too.
        system_key: The column of the system message, if the data has such a column.
        tools_key: The column of tools for the chat template, if the data has such a column: a list of JSON
            schemas, or such a list as JSON text.
        answer_key: The column of the ground truth, if the ground truth is not in `reward_model`.
        reward_fn_key: The column of data sources. It is optional if there is an `answer_key`.
        needs: The columns that the reward reads; None: there is no reward.
        beside: Additional required columns.
        media_keys: Columns of images, videos and sounds. If such columns exist, they must be empty.
        as_ids: Whether the prompts are token ids.
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
    def identifying_columns(self) -> tuple[str, ...]:
        return (self.prompt_key,)

    @property
    def scored(self) -> bool:
        """Whether the reward reads the data source and the ground truth."""
        return self.needs is not None and "reward_model" in self.needs

    @property
    def required(self) -> tuple[str, ...]:
        """The required columns."""
        stand_in = {"prompt": None, "data_source": self.reward_fn_key}
        if self.answer_key is not None:
            stand_in |= {"reward_model": self.answer_key, "data_source": None}
        names = (stand_in.get(name, name) for name in (*(self.needs or ()), *self.beside))
        wanted = (self.prompt_key, *names, self.system_key, self.tools_key)
        return tuple(dict.fromkeys(name for name in wanted if name is not None))

    @property
    def expected(self) -> str:
        """A description of a valid row, for messages."""
        parts = [f"{self.prompt_key}: [{{role, content}}, …], text, or token ids"]
        if self.scored and self.answer_key is None:
            parts += [f"{self.reward_fn_key}: a name; reward_model: {{style, ground_truth}}"]
            parts += ["extra_info: a mapping, if any"]
        if self.answer_key is not None:
            parts.append(f"{self.answer_key}: an answer")
        if self.tools_key is not None:
            parts.append(f"{self.tools_key}: a list of JSON schemas, or such a list as JSON")
        return "; ".join(parts)

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """Return the problem of a row; None if the row is valid."""
        found = _ids_problem if self.as_ids else prompt_problem
        if wrong := found(row[self.prompt_key]):
            return f"{self.prompt_key}: {wrong}"
        if held := [key for key in self.media_keys if row.get(key)]:
            return f"{held[0]}: not empty, but only text models can be trained"
        return self._beside_problem(row) or self._reward_problem(row)

    def _beside_problem(self, row: Mapping[str, Any]) -> str | None:
        system = None if self.system_key is None else row[self.system_key]
        if system is not None and not isinstance(system, str):
            return f"{self.system_key}: {kind(system)}, not text"
        if (system or self.tools_key) and self.as_ids:
            return f"{self.prompt_key}: token ids, which cannot be combined with a system message or tools"
        prompt = row[self.prompt_key]
        if system and not isinstance(prompt, str) and prompt[0]["role"] == "system":
            return f"{self.system_key}: not empty, but the prompt already has a system message"
        return tools_problem(row, self.tools_key)

    def _reward_problem(self, row: Mapping[str, Any]) -> str | None:
        if self.answer_key is not None and row[self.answer_key] is None:
            return f"{self.answer_key} is null, not an answer"
        if self.scored:
            return None if self.answer_key is not None else reward_problem(row, self.reward_fn_key)
        reserved = RESERVED if self.prompt_key == "prompt" else ("prompt", *RESERVED)
        for name in () if self.needs is None else reserved:
            if name in row:
                return f"the column name {name} is reserved for an argument of the reward function"
        return None

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the prompt as messages.

        A formatted text becomes one message without a role. For token ids, the result is [].
        """
        prompt = row[self.prompt_key]
        system = row.get(self.system_key) if self.system_key is not None else None
        if isinstance(prompt, str):
            formatted = not (self.apply_chat_template or system or self.tools_key)
            messages: list[Message] = [{"role": "" if formatted else "user", "content": prompt}]
        else:
            messages = plain(prompt) if isinstance(prompt[0], Mapping) else []
        return [{"role": "system", "content": system}, *messages] if system else messages

    def pieces(self, row: Mapping[str, Any], template: ChatTemplate) -> list[list[Piece]]:
        """Return a list with the `Piece`s of the row's only sequence, the prompt.

        Raises:
            TemplateError: The template rejects the row.
        """
        messages = self.messages(row)
        if not messages:
            return [[(row[self.prompt_key], False)]]
        if not messages[0]["role"]:
            return [template.prompt(messages[0]["content"])]
        return [template.prompt(messages, tools_of(row.get(self.tools_key or "")))]

    def source(self, row: Mapping[str, Any]) -> str:
        """Return the data source of a row."""
        return row.get(self.reward_fn_key) or UNNAMED

    def truth(self, row: Mapping[str, Any]) -> Any:
        """Return the ground truth of a row; None if there is no ground truth."""
        if self.answer_key:
            return row[self.answer_key]
        return (row.get("reward_model") or {}).get("ground_truth")


def tools_of(given: Any) -> list[Any] | None:
    """Return tools as a list for the chat template; None if there are no tools.

    Args:
        given: A list of JSON schemas, or such a list as JSON text.

    Raises:
        ValueError: The value is not a list of mappings.
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
