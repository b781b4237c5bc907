"""Conversations to text by the tokenizer's chat template."""

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
"""The config key of the template in commands that have one model."""


class ChatTemplate:
    """The tokenizer's chat template with fixed options.

    Args:
        tokenizer: a Hugging Face tokenizer.
        options: further variables of the template, such as enable_thinking.
        key: the config key of the template, for messages.
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
        """The conversation as text; the template is told of tools, as JSON schemas.

        Raises:
            DataError: the tokenizer has no chat template.
            TemplateError: the template refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise DataError(
                "the data hold conversations, and the tokenizer has no chat template to format them with",
                field="tokenizer.chat_template",
                got=f"None in {self._tokenizer.name_or_path or type(self._tokenizer).__name__}",
                expected="a Jinja chat template, or a prompt column that is text already formatted",
                remedy=f"set {self.key}=…",
            )
        text = _either(
            self.read(messages),
            lambda read: self._tokenizer.apply_chat_template(
                read, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.options
            ),
        )
        assert isinstance(text, str)
        return text

    def prompt(self, prompt: str | Sequence[Message], tools: list[Any] | None = None) -> list[Piece]:
        """Return a prompt up to where the answer begins.

        A text is taken as already formatted; the begin token that the tokenizer gives texts stands before
        it, unless the text has it. Raises as `render`.
        """
        if not isinstance(prompt, str):
            return [(self.render(prompt, generation_prompt=True, tools=tools), False)]
        ids, text = self._begin
        return [(prompt, False)] if not ids or prompt.startswith(text) else [(ids, False), (prompt, False)]

    @cached_property
    def _begin(self) -> tuple[list[int], str]:
        """What the tokenizer puts before a text."""
        ids = begin(self._tokenizer)
        return ids, "".join(self._tokenizer.convert_ids_to_tokens(ids))

    def marked(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and where in it `generation` marks of the template begin and end;
        no text where it has no marks. Raises as `render`."""
        template = self._tokenizer.chat_template and self._tokenizer.get_chat_template(None, tools)
        if not template or not _MARKS.search(template):
            return "", []
        options = {**self._tokenizer.special_tokens_map, **self.options}
        (text,), (marks,) = _either(
            self.read(messages),
            lambda read: render_jinja_template(
                [read], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **options
            ),
        )
        return text, marks

    def read(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template reads them."""
        given: list[Message] = plain(messages)
        if not self._in_parts:
            return given
        return [{**message, "content": _parts(message.get("content"))} for message in given]

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template reads no text as content but lists of its parts, as those of images do."""
        said = "tandem"

        def shown(content: Any) -> bool:
            asked = [{"role": "user", "content": content}]
            try:
                return said in self._tokenizer.apply_chat_template(asked, tokenize=False, **self.options)
            except Exception:  # whatever a template does with what it does not know
                return False

        return not shown(said) and shown(_parts(said))

    @property
    def eos(self) -> str:
        """The end-of-sequence token, empty where there is none."""
        return str(self._tokenizer.eos_token or "")

    @cached_property
    def markers(self) -> tuple[tuple[str, bool], ...]:
        """The tokens that were added to the vocabulary, such as those that begin and end turns, and whether
        each is a special one."""
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple((token.content, token.special) for token in added)

    def beginning(self, role: str) -> str:
        """Return the token with which a message of this role begins after the assistant's turn, with the
        blanks before it; empty where it begins with none that was added to the vocabulary."""
        if role not in self._beginnings:
            self._beginnings[role] = self._begun(role)
        return self._beginnings[role]

    def _begun(self, role: str) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        calls = {"tool_calls": [call]} if role == "tool" else {}
        asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **calls}
        try:
            ended = self.render([asked, answered])
            longer = self.render([asked, answered, {"role": role, "content": "c"}])
        except Exception:  # whatever a template does with roles that it does not know
            return ""
        follows = longer[len(ended) :] if longer.startswith(ended) else ""
        at = len(follows) - len(follows.lstrip())
        found = [marker for marker, _ in self.markers if follows.startswith(marker, at)]
        return follows[:at] + max(found, key=len, default="") if found else ""

    def unfit(self, reason: str) -> DataError:
        """The error of a template whose assistant's turns cannot be learnt."""
        return DataError(
            "the tokenizer's chat template does not show what the model is to write",
            field="tokenizer.chat_template",
            got=reason,
            expected="a turn of the assistant that follows the messages before it and the generation prompt",
            remedy=f"set a template that keeps earlier messages as they are: {self.key}=…",
        )

    def broken(self, reason: str) -> DataError:
        """The error of a template that is not Jinja, or fails in the same way for every row."""
        return DataError(
            "the tokenizer's chat template formats no conversation",
            field="tokenizer.chat_template",
            got=reason,
            expected="a Jinja template that takes messages of role and content",
            remedy=f"mend it in the model's folder, or set another: {self.key}=…",
        )


def _either(messages: list[Message], run: Callable[[list[Message]], Any]) -> Any:
    """What becomes of messages; where the template wants the arguments of tool calls as JSON and they are a
    mapping, or the other way round, of them so."""
    try:
        return run(messages)
    except (TypeError, UndefinedError):
        other = _otherwise(messages)
        if other == messages:
            raise
        return run(other)


def _otherwise(value: Any) -> Any:
    """The value with all `arguments` in it as JSON where they are a mapping, and the other way round."""
    if isinstance(value, list):
        return [_otherwise(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    changed = {name: _otherwise(inner) for name, inner in value.items()}
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
    """The value without the null fields that a columnar file adds to make all rows alike."""
    if isinstance(value, dict):
        present = ((name, inner) for name, inner in value.items() if inner is not None)
        return {name: inner if type(inner) is str else plain(inner) for name, inner in present}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells a tokenizer, with its chat template, from others."""
    template = json.dumps(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    files = Path(tokenizer.name_or_path).glob("*") if backend is None else ()
    code = [file_digest(file) for file in sorted(files) if file.is_file()]
    return digest(type(tokenizer).__name__, whole, code, tokenizer.special_tokens_map, template, today)
