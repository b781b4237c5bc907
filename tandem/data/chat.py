"""Conversations to text by the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.data.cache import digest, file_digest
from tandem.data.tokens import Piece, begin
from tandem.errors import DataError

Message = dict[str, Any]

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
        text = self._tokenizer.apply_chat_template(
            plain(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self.options,
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

    def pieces(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Piece]:
        """The rendered conversation cut where the assistant's turns begin and end.

        A turn begins where its generation prompt ends. It ends after its end-of-sequence token, or, if
        the template writes none, with the turn. Joined, the pieces are the rendered conversation.

        Args:
            messages: the first is not the assistant's.
            tools: that the template is told of, as JSON schemas.

        Raises:
            TemplateError: the template refuses the conversation, or renders a turn differently once
                others follow, so that it cannot be found in the whole.
        """
        whole = self.render(messages, tools=tools)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._start(whole, messages[:place], tools) for place in turns]
        pieces: list[Piece] = []
        end = 0
        for place, start, following in zip(turns, starts, [*starts[1:], len(whole)], strict=True):
            pieces.append((whole[end:start], False))
            end = self._end(whole, messages[: place + 1], start, following, tools)
            pieces.append((whole[start:end], True))
        pieces.append((whole[end:], False))
        return [piece for piece in pieces if piece[0]]

    def broken(self, reason: str) -> DataError:
        """The error of a template that is not Jinja, or fails in the same way for every row."""
        return DataError(
            "the tokenizer's chat template formats no conversation",
            field="tokenizer.chat_template",
            got=reason,
            expected="a Jinja template that takes messages of role and content",
            remedy=f"mend it in the model's folder, or set another: {self.key}=…",
        )

    def _start(self, whole: str, before: Sequence[Message], tools: list[Any] | None) -> int:
        """Finds where the turn after the messages `before` begins."""
        prompt = self.render(before, generation_prompt=True, tools=tools)
        if not whole.startswith(prompt):
            raise TemplateError(f"it changes the first {len(before)} message(s) once others follow")
        return len(prompt)

    def _end(
        self,
        whole: str,
        messages: Sequence[Message],
        start: int,
        following: int,
        tools: list[Any] | None,
    ) -> int:
        """Finds where the last of `messages` ends; it begins at `start`, its next turn at `following`."""
        eos = str(self._tokenizer.eos_token or "")
        turn = self.render(messages, tools=tools)
        if whole.startswith(turn):
            last = whole.rfind(eos, start, len(turn)) if eos else -1
            return last + len(eos) if last >= 0 else len(turn)
        # Some templates drop the thinking of earlier turns; the end-of-sequence token still ends them.
        first = whole.find(eos, start, following) if eos else -1
        if first < 0:
            raise TemplateError(f"it changes message {len(messages) - 1} once others follow")
        return first + len(eos)


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
