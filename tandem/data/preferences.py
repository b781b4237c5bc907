"""Pairs of answers of which people liked one better, tokenised once, to learn a reward from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate, Piece
from tandem.data.files import DataFiles, read_files
from tandem.data.reader import RowCheck, check_rows, read_sequences
from tandem.data.sft import turns_problem
from tandem.data.truncation import Limit
from tandem.data.validate import kind, prompt_problem
from tandem.protocol import DataProto, Ragged

_KEYS = ("data.prompt_key", "data.chosen_key", "data.rejected_key", "data.margin_key")


class PreferenceDataset:
    """The pairs of one or several data files.

    The chosen and the rejected answer are each either a conversation, a list of {role, content} that the
    assistant ends, or a text, which answers the prompt beside it (messages, or text taken as already
    formatted) and gets the end-of-sequence token. What follows the assistant's last end-of-sequence token
    is left out, so that a sequence ends where the model's answer does.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        chosen_key, rejected_key: the columns of the better and the worse answer.
        prompt_key: the column of prompts; only read where answers are texts.
        margin_key: the column of margins, by how much the chosen answer is to be better; None: by 0.
        max_length: tokens at most, of either answer with its prompt.
        truncation: what happens to longer ones: "error", or the part to cut: "left", "right", "middle".
        chat_template_kwargs: further variables of the chat template.

    Attributes:
        chosen, rejected: Ragged int32, a row per pair.
        chosen_mask, rejected_mask: Ragged bool, the tokens of the answers.
        margins: (P) fp64.

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
        prompt_key: str = "prompt",
        margin_key: str | None = None,
        max_length: int = 1024,
        truncation: str = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        limit = Limit(max_length, "data.max_length", truncation)
        answers = (chosen_key, rejected_key)
        needs = (*answers, *([] if margin_key is None else [margin_key]))
        table = read_files(files, (prompt_key, *needs), needs, keys=_KEYS)
        template = ChatTemplate(tokenizer, chat_template_kwargs)
        as_text = are_text(table, answers)
        if as_text and prompt_key not in table.columns:
            read_files(files, (prompt_key, *needs), keys=_KEYS)  # no prompt for these answers
        prompts = _checked(table, answers, prompt_key if as_text else None, margin_key, template)
        sides: list[tuple[Ragged, Ragged]] = []
        for key in answers:
            if as_text:
                texts = [record[key] for _, record in table.records([key])]
                pieces = [[(p, False), (text, True)] for p, text in zip(prompts, texts, strict=True)]
            else:
                pieces = template.rows(table, key, lambda messages: answered(template.pieces(messages)))
            sides.append(read_sequences(table, tokenizer, pieces, limit, ended=as_text))
        (self.chosen, self.chosen_mask), (self.rejected, self.rejected_mask) = sides
        self.margins = _margins(table, margin_key)

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, rows: Sequence[int], *, uid_prefix: str) -> DataProto:
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
            {"uid": [f"{uid_prefix}-{row}" for row in rows], "index": rows},
        )


def _side_by_side(first: Ragged, second: Ragged) -> Ragged:
    """Row i of both, joined."""
    both = Ragged.cat([first, second])
    turns = torch.arange(2 * len(first)).view(2, -1).T.flatten()
    return Ragged(both[turns].values, first.offsets + second.offsets)


def are_text(files: DataFiles, answers: Sequence[str]) -> bool:
    """Tells whether the answers are texts, by what the first row holds."""
    (first,) = files.take([0])
    return all(isinstance(first[key], str) for key in answers)


def answered(pieces: list[Piece]) -> list[Piece]:
    """Up to the end of the assistant's last turn."""
    last = max(place for place, (_, written) in enumerate(pieces) if written)
    return pieces[: last + 1]


def _checked(
    files: DataFiles,
    answers: Sequence[str],
    prompt_key: str | None,
    margin_key: str | None,
    template: ChatTemplate,
) -> list[str]:
    """The prompts as texts (none for conversations), once every row has been found to be in shape."""
    conversation = "[{role, content}, …] that the assistant ends"
    wanted = conversation if prompt_key is None else "text"
    columns = [name for name in (prompt_key, *answers, margin_key) if name is not None]
    prompt = "" if prompt_key is None else f"{prompt_key}: [{{role, content}}, …] or text; "
    margin = "" if margin_key is None else f"; {margin_key}: a number"
    check_rows(
        files,
        preference_check(answers, prompt_key, margin_key),
        columns=columns,
        expected=f"{prompt}{' and '.join(answers)}: {wanted}{margin}",
    )
    return [] if prompt_key is None else template.rows(files, prompt_key, template.prompt_text)


def preference_check(answers: Sequence[str], prompt_key: str | None, margin_key: str | None) -> RowCheck:
    """Looks at a row's answers, texts where there is a `prompt_key`, else conversations, and its margin."""

    def problem(row: dict[str, Any]) -> str | None:
        if prompt_key is not None and (wrong := prompt_problem(row[prompt_key])):
            return f"{prompt_key}: {wrong}"
        for key in answers:
            wrong = _text_problem(row[key]) if prompt_key is not None else _ending_problem(row[key])
            if wrong:
                return f"{key}: {wrong}"
        return None if margin_key is None else _margin_problem(margin_key, row[margin_key])

    return problem


def _text_problem(answer: Any) -> str | None:
    return None if isinstance(answer, str) else f"{kind(answer)}, not text"


def _ending_problem(messages: Any) -> str | None:
    if problem := turns_problem(messages):
        return problem
    return None if messages[-1]["role"] == "assistant" else "the assistant does not have the last word"


def _margin_problem(key: str, margin: Any) -> str | None:
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        return f"{key}: {kind(margin)}, not a number"
    return None if math.isfinite(margin) else f"{key}: {margin}, not a finite number"


def _margins(files: DataFiles, key: str | None) -> Tensor:
    if key is None:
        return torch.zeros(len(files), dtype=torch.float64)
    return torch.tensor([record[key] for _, record in files.records([key])], dtype=torch.float64)
