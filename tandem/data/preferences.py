"""Pairs of answers of which people liked one better, tokenised once, to learn a reward from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.examples import PreferenceForm
from tandem.data.files import DataFiles, read_files
from tandem.data.loader import Prefix, uids
from tandem.data.sft import are_text, encode_learnt, written
from tandem.protocol import DataProto, Ragged

_PROMPT = "prompt"
_KEYS = ("data.prompt_key", "data.chosen_key", "data.rejected_key", "data.margin_key")


class PreferenceDataset:
    """The pairs of one or several data files.

    The chosen and the rejected answer are each either a list of {role, content} that the assistant ends, or a
    text, which gets the end-of-sequence token. Messages that begin with the assistant's follow the prompt
    beside them (messages); others are a whole conversation. A text follows the prompt (messages, or text
    taken as already formatted); without a column of prompts it is the whole. What follows the assistant's
    last end-of-sequence token is left out, so that a sequence ends where the model's answer does.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        chosen_key, rejected_key: the columns of the better and the worse answer.
        prompt_key: the column of prompts. "prompt" may be missing, another only where answers are messages.
        margin_key: the column of margins, by how much the chosen answer is to be better; None: by 0.
        cache_dir: see `read_files`.
        options: see `encode_learnt`; the length is of either answer with its prompt.

    Attributes:
        chosen, rejected: Ragged int32, a row per pair.
        chosen_mask, rejected_mask: Ragged bool, the tokens of the answers.
        margins: (P) fp64.
        digests: (P) uint64, of each pair.

    Raises:
        DataError: anything wrong with the files or their rows; says which file, which rows, and what.
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
        (self.chosen, self.chosen_mask), (self.rejected, self.rejected_mask) = map(written, sides)
        self.digests = sides[0].digests
        margins = [0.0] * len(table)
        if margin_key is not None:
            margins = [float(record[margin_key]) for _, record in table.records([margin_key])]
        self.margins = torch.tensor(margins, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """A table of the named pairs, one to a row so that its halves are never parted.

        Returns:
            batch tokens (Ragged int64, the chosen sequence, then the rejected one), response_mask (Ragged
            bool), sequence_lengths (Ragged int64, the tokens of both), margin ((B) fp64); non-tensor uid
            ("{uid_prefix}-{row}") and index (the row's number in the files together).
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
    """Row i of both, joined."""
    both = Ragged.cat([first, second])
    turns = torch.arange(2 * len(first)).view(2, -1).T.flatten()
    return Ragged(both[turns].values, first.offsets + second.offsets)


def prompt_of(table: DataFiles, prompt_key: str, needs: Sequence[str]) -> str | None:
    """Return the column of prompts, None where there is none.

    Raises:
        DataError: the answers are texts, and a column of prompts that was named is missing.
    """
    if prompt_key in table.columns:
        return prompt_key
    if prompt_key != _PROMPT and are_text(table, needs[:2]):
        read_files([str(path) for path in table.paths], (prompt_key, *needs), keys=_KEYS)
    return None
