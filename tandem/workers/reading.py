"""Functions that prepare the input sequences of a reward model and the positions that it scores.

A reward model with the policy's tokenizer and chat template reads the policy's token ids. Otherwise the
conversation is formatted and tokenized again from text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate
from tandem.data.examples import answered
from tandem.data.tokens import Piece, encoded
from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.rewards.steps import ending_tokens, step_ends, steps_of_ids


@dataclass(frozen=True, slots=True)
class Reading:
    """The input sequences of a reward model for a batch of samples.

    Attributes:
        tokens: B sequences of token ids of the reward model.
        judged: Ragged bool like `tokens`, true at the tokens where steps are scored. None if each sequence is
            scored at its last token.
        places: (K) int64, for each scored token in order: the index of the step's last token in the flat
            `tokens` of the samples. None if each sequence is scored at its last token.
        failures: A dict from row to the reason why the sample cannot be read. Such a row has a single
            placeholder token.
    """

    tokens: Ragged
    judged: Ragged | None
    places: Tensor | None
    failures: dict[int, str]


class UnreadableSample(Exception):
    """The error when a reward model cannot read a sample. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A converter from samples to the input sequences of a reward model.

    Attributes:
        policy_tokenizer: The policy's tokenizer.
        own: The reward model's tokenizer, which formats conversations again. None if the model reads the
            policy's token ids.
        separator: The text that ends a step. None if whole responses are scored.
        most: The maximum length of an input sequence, in tokens. None if there is no limit.
    """

    policy_tokenizer: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase | None = None
    separator: str | None = None
    most: int | None = None

    def read(self, batch: DataProto, texts: list[str]) -> Reading:
        """Return the input sequences for a batch of samples.

        Args:
            batch: A batch with `tokens`, `response_mask` and `messages`.
            texts: The responses as text.
        """
        tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask")
        fits = self.most is None or not len(tokens) or int(tokens.lengths.max()) <= self.most
        if self.own is None and self.separator is None and fits:
            return Reading(tokens, None, None, {})
        rows: list[list[int]] = []
        judged: list[list[int]] = []
        places: list[int] = []
        failures: dict[int, str] = {}
        messages = batch.non_tensor_batch.get("messages", [()] * len(texts))
        starts = tokens.offsets.tolist()
        for row, (ids, written, before, text) in enumerate(zip(tokens, mask, messages, texts, strict=True)):
            steps: list[int] = []
            try:
                wrote = written.nonzero().flatten().tolist()
                if self.separator is not None:
                    found = steps_of_ids(self.policy_tokenizer, ids[written].tolist(), self.separator)
                    steps = [wrote[place] for place in found]
                read, at = self._row(ids, written, before, text, steps)
                if self.most is not None and len(read) > self.most:
                    raise UnreadableSample(f"{len(read)} tokens, but at most {self.most} are allowed")
                if steps and text.rpartition(self.separator or "\n")[2].strip():
                    steps[-1], at[-1] = wrote[-1], len(read) - 1  # the last step includes the end token
                # Drop steps that end in the same token as the next step, in the policy's or the model's
                # sequence.
                last = {step: place for place, step in dict(zip(at, steps, strict=True)).items()}
                steps, at = list(last), list(last.values())
            except UnreadableSample as problem:
                failures[row] = str(problem)
                read, at, steps = [0], [], []
            rows.append(read)
            judged.append(at)
            places += [starts[row] + step for step in steps]
        read_tokens = Ragged.from_list([torch.tensor(row) for row in rows], torch.int64)
        if self.separator is None:
            return Reading(read_tokens, None, None, failures)
        marks_T = torch.zeros(len(read_tokens.values), dtype=torch.bool)
        for start, at in zip(read_tokens.offsets.tolist(), judged, strict=False):
            marks_T[[start + place for place in at]] = True
        places_K = torch.tensor(places, dtype=torch.int64)
        return Reading(read_tokens, read_tokens.with_values(marks_T), places_K, failures)

    def _row(
        self, ids: Tensor, written: Tensor, messages: Any, text: str, steps: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the input token ids for a sample, and the indices of the steps' last tokens in them."""
        if self.own is None:
            return ids.tolist(), steps
        pieces = self._pieces(ids, written, messages, text)
        (parts,) = encoded(self.own, [pieces])
        read: list[int] = np.concatenate(parts).tolist()
        at = self._steps(str(pieces[-1][0]), text, len(read)) if self.separator is not None else []
        if len(at) != len(steps):
            raise UnreadableSample(f"the response has {len(steps)} steps, but the model reads {len(at)}")
        alone = not (messages and messages[0]["role"])
        if alone and parts[-1][-1:].tolist() != [self.own.eos_token_id]:  # as `tandem rm` does
            read.append(int(self.own.eos_token_id))
        return read, at

    def _pieces(self, ids: Tensor, written: Tensor, messages: Any, text: str) -> list[Piece]:
        """Return the conversation as pieces of text. The last piece is the response."""
        assert self.own is not None
        template = ChatTemplate(self.own, None, "custom_chat_template")
        if not messages or not messages[0]["role"]:
            prompt = (
                messages[0]["content"]
                if messages
                else str(self.policy_tokenizer.decode(ids[~written].tolist()))
            )
            return [*template.prompt(prompt), (text, True)]
        try:
            pieces = answered(template, [*messages, {"role": "assistant", "content": text}])
        except (TemplateError, DataError) as error:
            raise UnreadableSample(f"its chat template cannot format the conversation: {error}") from error
        return pieces

    def _steps(self, response: str, text: str, total: int) -> list[int]:
        """Return the indices of the tokens in which the steps of a response end.

        The response must be at the end of a sequence of `total` tokens.
        """
        start, inner = response.rfind(text), text
        if start < 0:
            start, inner = response.rfind(text.strip()), text.strip()
        if start < 0:
            raise UnreadableSample("its chat template changes the response, so the steps cannot be found")
        assert self.separator is not None and self.own is not None
        ends = [start + end for end in step_ends(inner, self.separator)]
        alone = self.own(response, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = [end for _, end in alone["offset_mapping"]]
        return [max(total - len(offsets) + place, 0) for place in ending_tokens(ends, offsets)]
