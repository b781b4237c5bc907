"""Preference pairs for training a reward model, tokenized once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.examples import PreferenceForm
from tandem.data.files import DataFiles, read_files
from tandem.data.loader import Prefix, uids
from tandem.data.sft import are_text, encode_learnt, tokens_and_mask
from tandem.protocol import DataProto, Ragged

_PROMPT = "prompt"
_KEYS = ("data.prompt_key", "data.chosen_key", "data.rejected_key", "data.margin_key")


class PreferenceDataset:
    """The pairs of one or several data files.

    The chosen and the rejected response are both texts or both lists of {role, content} that end with the
    assistant's message. A text gets the end-of-sequence token at its end. Messages that start with an
    assistant's message continue the prompt of the row, which must be messages too; other messages are a whole
    conversation. A text follows the prompt (messages, or formatted text); without a prompt column the text is
    the whole sequence. Everything after the assistant's last end-of-sequence token is left out, so a sequence
    ends where the model's response ends.

    Args:
        files: Paths of parquet or .jsonl files.
        tokenizer: A Hugging Face tokenizer.
        chosen_key: The column of the better response.
        rejected_key: The column of the worse response.
        prompt_key: The column of prompts. "prompt" may be missing. A column of another name may be missing
            only if the responses are messages.
        margin_key: The column of margins: how much higher the chosen response should score. None: all margins
            are 0.
        cache_dir: The cache folder; see `read_files`.
        options: See `encode_learnt`. The length limit applies to each response together with its prompt.

    Attributes:
        chosen: Ragged int32, one row per pair.
        rejected: Ragged int32, one row per pair.
        chosen_mask: Ragged bool, true for the tokens of the response.
        rejected_mask: Ragged bool, true for the tokens of the response.
        margins: (P) fp64.
        digests: (P) uint64, one digest per pair.

    Raises:
        DataError: Something is wrong with the files or their rows. The error names the file, the rows and the
            problem.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        prompt_key: str = _PROMPT,
        margin_key: str | None = None,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        answers = (chosen_key, rejected_key)
        needs = (*answers, *([] if margin_key is None else [margin_key]))
        table = read_files(files, (prompt_key, *needs), needs, keys=_KEYS, cache_dir=cache_dir)
        prompt = prompt_of(table, prompt_key, needs)
        form = PreferenceForm(answers, prompt, margin_key, are_text(table, answers))
        sides = [
            encode_learnt(table, tokenizer, replace(form, side=key), cache_dir=cache_dir, **options)
            for key in answers
        ]
        (self.chosen, self.chosen_mask), (self.rejected, self.rejected_mask) = map(tokens_and_mask, sides)
        self.digests = sides[0].digests
        margins = [0.0] * len(table)
        if margin_key is not None:
            margins = [float(record[margin_key]) for _, record in table.records([margin_key])]
        self.margins = torch.tensor(margins, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """Return a table of the pairs with the given numbers.

        A pair is one row of the table, so its two sequences always stay together.

        Returns:
            batch tokens (Ragged int64, the chosen sequence, then the rejected sequence), response_mask
            (Ragged bool), sequence_lengths (Ragged int64, the token counts of both sequences), margin ((B)
            fp64); non-tensor uid ("{uid_prefix}-{row}") and index (the row's number in the files together).
        """
        rows = list(rows)
        tokens = _side_by_side(self.chosen[rows], self.rejected[rows])
        lengths = torch.stack([self.chosen[rows].lengths, self.rejected[rows].lengths], 1)
        return DataProto(
            {
                "tokens": tokens.to(torch.int64),
                "response_mask": _side_by_side(self.chosen_mask[rows], self.rejected_mask[rows]),
                "sequence_lengths": Ragged.from_lengths(lengths.flatten(), [2] * len(rows)),
                "margin": self.margins[rows],
            },
            {"uid": uids(uid_prefix, rows), "index": rows},
        )


def _side_by_side(first: Ragged, second: Ragged) -> Ragged:
    """Return a ragged tensor whose row i is row i of `first` followed by row i of `second`."""
    both = Ragged.cat([first, second])
    turns = torch.arange(2 * len(first)).view(2, -1).T.flatten()
    return Ragged(both[turns].values, first.offsets + second.offsets)


def prompt_of(table: DataFiles, prompt_key: str, needs: Sequence[str]) -> str | None:
    """Return the column of prompts; None if the data has no such column.

    Raises:
        DataError: The responses are texts, and the named column of prompts is missing.
    """
    if prompt_key in table.columns:
        return prompt_key
    if prompt_key != _PROMPT and are_text(table, needs[:2]):
        read_files([str(path) for path in table.paths], (prompt_key, *needs), keys=_KEYS)
    return None
