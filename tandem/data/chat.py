"""Conversations to text by the tokenizer's chat template, and text to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from tandem.data.files import DataFiles
from tandem.data.validate import RowProblems
from tandem.errors import DataError

T = TypeVar("T")
Message = dict[str, Any]
Piece = tuple[str, bool]
"""Text, and whether the model is to learn to write it."""

TEMPLATE_KEY = "model.custom_chat_template"
"""The config key of the template in commands that have one model."""
TOKENIZE_CHUNK = 4096
"""Texts per call of the tokenizer: enough to keep it busy, few enough to keep its results small."""


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
        self._key = key
        self._tokenizer = tokenizer
        self._options = dict(options or {})

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The conversation as text.

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
                remedy=f"set {self._key}=…",
            )
        text = self._tokenizer.apply_chat_template(
            plain_messages(messages), tokenize=False, add_generation_prompt=generation_prompt, **self._options
        )
        assert isinstance(text, str)
        return text

    def prompt_text(self, prompt: str | Sequence[Message]) -> str:
        """A prompt up to where the answer begins; text is taken as already formatted. Raises as `render`."""
        return prompt if isinstance(prompt, str) else self.render(prompt, generation_prompt=True)

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """The rendered conversation cut where the assistant's turns begin and end.

        A turn begins where its generation prompt ends. It ends after its end-of-sequence token, or, if
        the template writes none, with the turn. Joined, the pieces are the rendered conversation.

        Args:
            messages: the first is not the assistant's.

        Raises:
            TemplateError: the template refuses the conversation, or renders a turn differently once
                others follow, so that it cannot be found in the whole.
        """
        whole = self.render(messages)
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._start(whole, messages[:place]) for place in turns]
        pieces: list[Piece] = []
        end = 0
        for place, start, following in zip(turns, starts, [*starts[1:], len(whole)], strict=True):
            pieces.append((whole[end:start], False))
            end = self._end(whole, messages[: place + 1], start, following)
            pieces.append((whole[start:end], True))
        pieces.append((whole[end:], False))
        return [piece for piece in pieces if piece[0]]

    def rows(self, files: DataFiles, column: str, form: Callable[[Any], T]) -> list[T]:
        """`form`, a method of this template, of every row's entry in `column`.

        Raises:
            DataError: rows for which `form` raised TemplateError, by number; or the template itself, where it
                is not Jinja or fails in the same way for every row.
        """
        problems = RowProblems(files.where)
        formed: list[T] = []
        reasons: set[str] = set()
        rows = 0
        for row, record in files.records([column]):
            rows += 1
            try:
                formed.append(form(record[column]))
            except TemplateSyntaxError as error:
                raise self._broken(str(error)) from error
            except TemplateError as error:
                reasons.add(str(error))
                problems.add(row, str(error))
        if rows > 1 and not formed and len(reasons) == 1:
            raise self._broken(f"{reasons.pop()}, for each of {rows} rows")
        problems.raise_if_any(
            "that the tokenizer's chat template cannot format",
            field=files.names,
            expected="conversations that the template accepts",
            remedy=f"mend these rows, or set another template: {self._key}=…",
        )
        return formed

    def _broken(self, reason: str) -> DataError:
        return DataError(
            "the tokenizer's chat template formats no conversation",
            field="tokenizer.chat_template",
            got=reason,
            expected="a Jinja template that takes messages of role and content",
            remedy=f"mend it in the model's folder, or set another: {self._key}=…",
        )

    def _start(self, whole: str, before: Sequence[Message]) -> int:
        """Finds where the turn after the messages `before` begins."""
        prompt = self.prompt_text(before)
        if not whole.startswith(prompt):
            raise TemplateError(f"it changes the first {len(before)} message(s) once others follow")
        return len(prompt)

    def _end(self, whole: str, messages: Sequence[Message], start: int, following: int) -> int:
        """Finds where the last of `messages` ends; it begins at `start`, its next turn at `following`."""
        eos = str(self._tokenizer.eos_token or "")
        turn = self.render(messages)
        if whole.startswith(turn):
            last = whole.rfind(eos, start, len(turn)) if eos else -1
            return last + len(eos) if last >= 0 else len(turn)
        # Some templates drop the thinking of earlier turns; the end-of-sequence token still ends them.
        first = whole.find(eos, start, following) if eos else -1
        if first < 0:
            raise TemplateError(f"it changes message {len(messages) - 1} once others follow")
        return first + len(eos)


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages without the null fields that a columnar file adds to make all rows alike."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """(T_i) int32 token ids of each text as it stands: no special tokens are added."""
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZE_CHUNK):
        encoded = tokenizer(
            list(texts[start : start + TOKENIZE_CHUNK]),
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        ids.extend(np.array(row, dtype=np.int32) for row in encoded["input_ids"])
    return ids
