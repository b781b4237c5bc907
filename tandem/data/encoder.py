"""Convert rows to token ids: check, format, tokenize and apply the length limit.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from tandem.data.cache import digest, number_of
from tandem.data.chat import ChatTemplate, plain, tokenizer_digest
from tandem.data.examples import ExampleForm
from tandem.data.forms import PromptForm
from tandem.data.tokens import Piece, encoded
from tandem.data.truncation import Limit
from tandem.errors import DataError

FORMAT = 2
"""The version of the cached tokens. Cached tokens of another version are recomputed."""
SHAPE, FAILED, TEMPLATE, EMPTY, UNLEARNT = "shape", "failed", "template", "empty", "unlearnt"
Problems = dict[str, list[tuple[int, str]]]
"""A dict from type of problem to a list of (row number, description)."""

Form = PromptForm | ExampleForm


@dataclass
class EncodedRows:
    """The tokens and problems of some rows.

    Attributes:
        ids: int32 token ids of all sequences that the limit keeps, concatenated. Long sequences are cut to
            the limit.
        masks: bool, whether the model is trained to write each token. The first token of a sequence is always
            false, because no token comes before it. Empty if the rows are not training examples.
        lengths: (S) The number of tokens of each sequence before the cut.
        rows: (S) int64, the row number of each sequence, ascending. A row with a problem has one sequence
            without tokens.
        digests: (S) uint64, a digest of the columns that identify each sequence's row.
        problems: A dict from type of problem to a list of (row number, description).
        formed: The number of rows that the chat template formatted.
        error: An error of the template or the tokenizer that does not depend on the row.
    """

    ids: np.ndarray
    masks: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    digests: np.ndarray
    problems: Problems
    formed: int = 0
    error: DataError | None = None


@dataclass(frozen=True)
class Encoder:
    """A converter from rows to token ids.

    Attributes:
        form: The form of the rows, which checks rows and converts them to text; see `tandem.data.forms`.
        tokenizer: A Hugging Face tokenizer.
        template: The tokenizer's chat template.
        limit: The limit of a sequence's length.
        ended: Whether to add the end-of-sequence token to each sequence that does not end with it. The model
            is trained to write this token.
        learnt: Whether each row must contain tokens that the model is trained to write.
    """

    form: Form
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    limit: Limit
    ended: bool = False
    learnt: bool = False

    @property
    def digest(self) -> str:
        """A digest of all settings that affect the results."""
        settings = (FORMAT, self.form, self.limit, self.ended, self.learnt, self.template.options)
        return digest(settings, tokenizer_digest(self.tokenizer))

    def part(self, records: Sequence[dict[str, Any]], numbers: Sequence[int]) -> EncodedRows:
        """Return the tokens and problems of `records`, whose row numbers are `numbers`."""
        problems: Problems = defaultdict(list)
        digests = np.zeros(len(records), np.uint64)
        rows: list[list[list[Piece]]] = [[[]] for _ in records]
        formed = 0
        error = None
        for at, record in enumerate(records):
            digests[at] = number_of(_json([plain(record[name]) for name in self.form.identifying_columns]))
            try:
                if problem := self.form.problem(record):
                    problems[SHAPE].append((numbers[at], problem))
                elif error is None:
                    rows[at] = self.form.pieces(record, self.template)
                    formed += 1
            except TemplateSyntaxError as broken:
                error = self.template.broken(str(broken))
            except TemplateError as refused:
                problems[TEMPLATE].append((numbers[at], str(refused)))
            except DataError as unfit:
                error = unfit
            except Exception as raised:
                problems[FAILED].append((numbers[at], _named(raised)))
        counts = list(map(len, rows))
        owners = np.repeat(np.array(numbers, np.int64), counts)
        made = self._joined([pieces for row in rows for pieces in row], owners, problems)
        return replace(made, digests=np.repeat(digests, counts), formed=formed, error=error)

    def _joined(self, rows: Sequence[list[Piece]], owners: np.ndarray, problems: Problems) -> EncodedRows:
        """Tokenize the pieces of each sequence, join them and apply the length limit."""
        end = _eos(self.tokenizer) if self.ended else None
        lengths = np.zeros(len(rows), np.int64)
        values: list[np.ndarray] = [np.zeros(0, np.int32)]
        masks: list[np.ndarray] = [np.zeros(0, bool)]
        for at, (pieces, ids) in enumerate(zip(rows, self._tokenized(rows, owners, problems), strict=True)):
            number = int(owners[at])
            if not pieces:  # the row has a problem
                continue
            parts = [*zip(ids, (written for _, written in pieces), strict=True)]
            if end is not None and parts[-1][0][-1:].tolist() != [end]:
                parts.append((np.array([end], np.int32), True))
            tokens = np.concatenate([part for part, _ in parts])
            lengths[at] = len(tokens)
            if not len(tokens):
                problems[EMPTY].append((number, "no tokens"))
            if not self.limit.holds(len(tokens)):
                continue
            values.append(self.limit.cut(tokens))
            if self.learnt:
                mask = self.limit.cut(np.repeat([w for _, w in parts], [len(part) for part, _ in parts]))
                mask[:1] = False
                masks.append(mask)
                if not mask.any():
                    problems[UNLEARNT].append((number, f"none of its {len(mask)} tokens is trained on"))
        return EncodedRows(
            np.concatenate(values), np.concatenate(masks), lengths, owners, np.zeros(0), problems
        )

    def _tokenized(
        self, rows: Sequence[list[Piece]], owners: np.ndarray, problems: Problems
    ) -> Iterator[list[np.ndarray]]:
        """Yield the int32 token ids of each piece of each sequence."""
        try:
            yield from encoded(self.tokenizer, rows)
        except Exception:  # one row failed; tokenize the rows one by one to find it
            for row, pieces in zip(owners.tolist(), rows, strict=True):
                try:
                    (ids,) = encoded(self.tokenizer, [pieces])
                except Exception as error:
                    problems[FAILED].append((row, _named(error)))
                    ids = [np.zeros(1, np.int32)] * len(pieces)
                yield ids


_json = json.JSONEncoder(default=str).encode


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token to add after responses",
            field="tokenizer.eos_token",
            got=f"None in {tokenizer.name_or_path or type(tokenizer).__name__}",
            expected="an eos_token in tokenizer_config.json",
            remedy="set eos_token there; without it the model would never learn to stop",
        )
    return int(tokenizer.eos_token_id)
