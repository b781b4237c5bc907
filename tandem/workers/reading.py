"""What a reward model reads of samples: the policy's token ids, or, where its tokenizer or chat template is
another, the conversation anew from text; and where in it the model judges."""

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
    """What a model reads of some samples.

    Attributes:
        tokens: B sequences of its own ids.
        judged: ragged bool beside `tokens`, where steps are judged; None: at each sequence's last token.
        places: (K) int64, for each judged token in their order, where in the samples' flat `tokens` the step
            ends; None as above.
        failures: why a sample is not read, by row; a single token stands for it.
    """

    tokens: Ragged
    judged: Ragged | None
    places: Tensor | None
    failures: dict[int, str]


class NotRead(Exception):
    """A sample that the model cannot read; says why."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Makes what a reward model reads.

    Attributes:
        policys: the policy's tokenizer.
        own: the model's, with which it reads conversations anew; None: it reads the policy's ids.
        separator: the text that ends a step; None: responses are judged as a whole.
        most: the tokens of its longest sequence; None: any.
    """

    policys: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase | None = None
    separator: str | None = None
    most: int | None = None

    def read(self, batch: DataProto, texts: list[str]) -> Reading:
        """
        Args:
            batch: `tokens`, `response_mask`, `messages`.
            texts: the responses.
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
                    found = steps_of_ids(self.policys, ids[written].tolist(), self.separator)
                    steps = [wrote[place] for place in found]
                read, at = self._row(ids, written, before, text, steps)
                if self.most is not None and len(read) > self.most:
                    raise NotRead(f"{len(read)} tokens, of at most {self.most}")
                if steps and text.rpartition(self.separator or "\n")[2].strip():
                    steps[-1], at[-1] = wrote[-1], len(read) - 1  # with the token that ends the sequence
                # without steps that end in the same token as the next, in the one text or in the other
                last = {step: place for place, step in dict(zip(at, steps, strict=True)).items()}
                steps, at = list(last), list(last.values())
            except NotRead as problem:
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
        """The ids that the model reads of a sample, and the places of its steps among them."""
        if self.own is None:
            return ids.tolist(), steps
        pieces = self._pieces(ids, written, messages, text)
        (parts,) = encoded(self.own, [pieces])
        read: list[int] = np.concatenate(parts).tolist()
        at = self._steps(str(pieces[-1][0]), text, len(read)) if self.separator is not None else []
        if len(at) != len(steps):
            raise NotRead(f"{len(steps)} steps were written, and {len(at)} are read")
        alone = not (messages and messages[0]["role"])
        if alone and parts[-1][-1:].tolist() != [self.own.eos_token_id]:  # as `tandem rm` reads texts
            read.append(int(self.own.eos_token_id))
        return read, at

    def _pieces(self, ids: Tensor, written: Tensor, messages: Any, text: str) -> list[Piece]:
        """The conversation as text, the response last."""
        assert self.own is not None
        template = ChatTemplate(self.own, None, "custom_chat_template")
        if not messages or not messages[0]["role"]:
            prompt = messages[0]["content"] if messages else str(self.policys.decode(ids[~written].tolist()))
            return [*template.prompt(prompt), (text, True)]
        try:
            pieces = answered(template, [*messages, {"role": "assistant", "content": text}])
        except (TemplateError, DataError) as error:
            raise NotRead(f"its chat template does not format the conversation: {error}") from error
        return pieces

    def _steps(self, response: str, text: str, total: int) -> list[int]:
        """The tokens in which the steps of a response end; it ends a sequence of `total` tokens."""
        start, inner = response.rfind(text), text
        if start < 0:
            start, inner = response.rfind(text.strip()), text.strip()
        if start < 0:
            raise NotRead("its chat template changes the response, whose steps are not found in it")
        assert self.separator is not None and self.own is not None
        ends = [start + end for end in step_ends(inner, self.separator)]
        alone = self.own(response, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = [end for _, end in alone["offset_mapping"]]
        return [max(total - len(offsets) + place, 0) for place in ending_tokens(ends, offsets)]
