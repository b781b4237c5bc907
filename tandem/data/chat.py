"""Format conversations as text with the tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import UndefinedError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tandem.data.cache import digest, file_digest
from tandem.data.tokens import Piece, begin
from tandem.errors import DataError
from tandem.texts import parse_json

Message = dict[str, Any]

_MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
TEMPLATE_KEY = "model.custom_chat_template"
"""The config key of the chat template in commands that have one model."""


class ChatTemplate:
    """The tokenizer's chat template with fixed options.

    Args:
        tokenizer: A Hugging Face tokenizer.
        options: Additional variables of the template, such as `enable_thinking`.
        key: The config key of the template, for messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None, key: str = TEMPLATE_KEY
    ) -> None:
        self.key = key
        self._tokenizer = tokenizer
        self.options = dict(options or {})
        self._beginnings: dict[str, str] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = False,
        tools: list[Any] | None = None,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: The conversation.
            generation_prompt: Whether to add the generation prompt at the end.
            tools: JSON schemas of the tools, which the template may describe in the text.

        Raises:
            DataError: The tokenizer has no chat template.
            TemplateError: The template rejects the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise DataError(
                "the data contain conversations, but the tokenizer has no chat template to format them",
                field="tokenizer.chat_template",
                got=f"None in {self._tokenizer.name_or_path or type(self._tokenizer).__name__}",
                expected="a Jinja chat template, or a prompt column of formatted text",
                remedy=f"set {self.key}=…",
            )
        text = _with_either_arguments(
            self.read(messages),
            lambda read: self._tokenizer.apply_chat_template(
                read, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.options
            ),
        )
        assert isinstance(text, str)
        return text

    def prompt(self, prompt: str | Sequence[Message], tools: list[Any] | None = None) -> list[Piece]:
        """Return a prompt as `Piece`s (text or token ids), up to the start of the response.

        A text prompt counts as already formatted. If the tokenizer puts a begin token before texts, this
        method puts the token before the prompt, unless the prompt already starts with the token. Raises the
        errors of `render`.
        """
        if not isinstance(prompt, str):
            return [(self.render(prompt, generation_prompt=True, tools=tools), False)]
        ids, text = self._begin
        return [(prompt, False)] if not ids or prompt.startswith(text) else [(ids, False), (prompt, False)]

    @cached_property
    def _begin(self) -> tuple[list[int], str]:
        """Return the ids and the text of the begin token that the tokenizer puts before a text."""
        ids = begin(self._tokenizer)
        return ids, "".join(self._tokenizer.convert_ids_to_tokens(ids))

    def marked(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans of the template's `generation` marks.

        Each span is (start, end) in characters. The text is empty if the template has no `generation` marks.
        Raises the errors of `render`.
        """
        template = self._tokenizer.chat_template and self._tokenizer.get_chat_template(None, tools)
        if not template or not _MARKS.search(template):
            return "", []
        options = {**self._tokenizer.special_tokens_map, **self.options}
        (text,), (marks,) = _with_either_arguments(
            self.read(messages),
            lambda read: render_jinja_template(
                [read], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **options
            ),
        )
        return text, marks

    def read(self, messages: Sequence[Message]) -> list[Message]:
        """Convert messages to the format that the template expects."""
        given: list[Message] = plain(messages)
        if not self._in_parts:
            return given
        return [{**message, "content": _parts(message.get("content"))} for message in given]

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template needs message content as a list of parts instead of text.

        Templates of multimodal models often need such lists.
        """
        sample = "tandem"

        def shown(content: Any) -> bool:
            asked = [{"role": "user", "content": content}]
            try:
                return sample in self._tokenizer.apply_chat_template(asked, tokenize=False, **self.options)
            except Exception:  # a template may raise anything for content that it does not know
                return False

        return not shown(sample) and shown(_parts(sample))

    @property
    def eos(self) -> str:
        """The end-of-sequence token as text; "" if the tokenizer has no such token."""
        return str(self._tokenizer.eos_token or "")

    @cached_property
    def markers(self) -> tuple[tuple[str, bool], ...]:
        """The tokens that were added to the vocabulary, each with a flag: whether it is a special token.

        Tokens that start and end turns are typical examples.
        """
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple((token.content, token.special) for token in added)

    def beginning(self, role: str) -> str:
        """Return the token that starts a message of this role after an assistant's turn.

        Whitespace before the token is included. The result is "" if the message does not start with a token
        that was added to the vocabulary.
        """
        if role not in self._beginnings:
            self._beginnings[role] = self._find_beginning(role)
        return self._beginnings[role]

    def _find_beginning(self, role: str) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        calls = {"tool_calls": [call]} if role == "tool" else {}
        asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **calls}
        try:
            ended = self.render([asked, answered])
            longer = self.render([asked, answered, {"role": role, "content": "c"}])
        except Exception:  # a template may raise anything for roles that it does not know
            return ""
        follows = longer[len(ended) :] if longer.startswith(ended) else ""
        at = len(follows) - len(follows.lstrip())
        found = [marker for marker, _ in self.markers if follows.startswith(marker, at)]
        return follows[:at] + max(found, key=len, default="") if found else ""

    def unfit(self, reason: str) -> DataError:
        """Return the error for a template whose assistant turns cannot be used for training."""
        return DataError(
            "the tokenizer's chat template does not show which text the model should write",
            field="tokenizer.chat_template",
            got=reason,
            expected="a turn of the assistant that follows the messages before it and the generation prompt",
            remedy=f"set a template that does not change earlier messages: {self.key}=…",
        )

    def broken(self, reason: str) -> DataError:
        """Return the error for a template that is not valid Jinja or fails for every row in the same way."""
        return DataError(
            "the tokenizer's chat template cannot format any conversation",
            field="tokenizer.chat_template",
            got=reason,
            expected="a Jinja template that takes messages with role and content",
            remedy=f"fix the template in the model's folder, or set another one: {self.key}=…",
        )


def _with_either_arguments(messages: list[Message], run: Callable[[list[Message]], Any]) -> Any:
    """Return `run(messages)`, with the arguments of tool calls in the format that the template accepts.

    Some templates need the arguments as JSON text, others as a mapping. If the given format fails, the other
    format is tried.
    """
    try:
        return run(messages)
    except (TypeError, UndefinedError):
        other = _arguments_converted(messages)
        if other == messages:
            raise
        return run(other)


def _arguments_converted(value: Any) -> Any:
    """Return the value with every `arguments` entry converted.

    A mapping becomes JSON text, and JSON text becomes a mapping.
    """
    if isinstance(value, list):
        return [_arguments_converted(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    changed = {name: _arguments_converted(inner) for name, inner in value.items()}
    given = value.get("arguments")
    if isinstance(given, dict):
        changed["arguments"] = json.dumps(given, ensure_ascii=False)
    elif isinstance(given, str):
        with suppress(ValueError):
            changed["arguments"] = parse_json(given)
    return changed


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def plain(value: Any) -> Any:
    """Return the value without null fields.

    Columnar files add null fields so that all rows have the same fields.
    """
    if isinstance(value, dict):
        present = ((name, inner) for name, inner in value.items() if inner is not None)
        return {name: inner if type(inner) is str else plain(inner) for name, inner in present}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of a tokenizer and its chat template."""
    template = json.dumps(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    files = Path(tokenizer.name_or_path).glob("*") if backend is None else ()
    code = [file_digest(file) for file in sorted(files) if file.is_file()]
    return digest(type(tokenizer).__name__, whole, code, tokenizer.special_tokens_map, template, today)
