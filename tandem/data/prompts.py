"""Prompts to answer: read, checked, formatted and tokenised once, before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate, format_rows, plain_messages, tokenize
from tandem.data.files import DataFiles, read_files
from tandem.data.truncation import check_truncation, cut, refuse_long
from tandem.data.validate import RowProblems, prompt_problem, reward_problem
from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged


class PromptDataset:
    """The prompts of one or several data files.

    A row has a prompt (a list of {role, content}, formatted with the tokenizer's chat template, or a
    text, taken as already formatted), a data source, which chooses the reward, `reward_model` with its
    `ground_truth`, and perhaps `extra_info`.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        prompt_key: the column of prompts.
        reward_fn_key: the column of data sources.
        max_prompt_length: tokens at most, the template's included.
        truncation: what happens to longer prompts: "error", or the part to cut: "left", "right", "middle".
        filter_overlong_prompts: drop longer prompts instead.
        max_samples: use the first so many rows; -1 uses all.
        chat_template_kwargs: further variables of the chat template.

    Attributes:
        tokens: Ragged int32, one row per prompt.
        data_sources: the different ones, sorted.
        dropped: how many prompts were left out for their length.

    Raises:
        DataError: anything wrong with the files or their rows; says which file, which rows, and what.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        reward_fn_key: str = "data_source",
        max_prompt_length: int = 512,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        columns = (prompt_key, reward_fn_key, "reward_model")
        self._files = read_files(files, columns, optional=("extra_info",), max_samples=max_samples)
        self._prompt_key = prompt_key
        self._source_key = reward_fn_key
        self.data_sources = _checked_sources(self._files, prompt_key, reward_fn_key)
        template = ChatTemplate(tokenizer, chat_template_kwargs)
        prompts = tokenize(tokenizer, format_rows(self._files, prompt_key, template.prompt_text))
        _refuse_empty(self._files, prompts)
        lengths = np.array([len(ids) for ids in prompts])
        self._rows = np.arange(len(prompts))
        if filter_overlong_prompts:
            self._rows = np.flatnonzero(lengths <= max_prompt_length)
            if len(self._rows) == 0:
                raise _all_dropped(self._files, lengths, max_prompt_length)
        elif truncation == "error":
            refuse_long(lengths, max_prompt_length, self._files.where, field="data.max_prompt_length")
        kept = [cut(prompts[row], max_prompt_length, truncation) for row in self._rows]
        self.dropped = len(prompts) - len(kept)
        self.tokens = Ragged.from_lengths(torch.from_numpy(np.concatenate(kept)), [len(ids) for ids in kept])

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int], *, uid_prefix: str) -> DataProto:
        """A table of the named prompts.

        Args:
            rows: numbers below `len(self)`.
            uid_prefix: the epoch, or "val"; a prompt's uid is "{uid_prefix}-{index}".

        Returns:
            batch["prompts"] Ragged int64; non-tensor uid, data_source, ground_truth, messages (empty for a
            prompt that is plain text), extra_info, index (the row's number in the files together).
        """
        index = self._rows[np.asarray(rows, dtype=np.int64)]
        records = self._files.take(index)
        prompts = [record[self._prompt_key] for record in records]
        return DataProto(
            {"prompts": self.tokens[list(rows)].to(torch.int64)},
            {
                "uid": [f"{uid_prefix}-{row}" for row in index],
                "data_source": [record[self._source_key] for record in records],
                "ground_truth": [record["reward_model"]["ground_truth"] for record in records],
                "messages": [[] if isinstance(prompt, str) else plain_messages(prompt) for prompt in prompts],
                "extra_info": [record.get("extra_info") or {} for record in records],
                "index": index.tolist(),
            },
        )


def _checked_sources(files: DataFiles, prompt_key: str, source_key: str) -> tuple[str, ...]:
    """The data sources, once every row has been found to be of the right shape."""
    problems = RowProblems(files.where)
    sources: set[str] = set()
    for row, record in files.records():
        prompt = prompt_problem(record[prompt_key])
        problem = f"{prompt_key}: {prompt}" if prompt else reward_problem(record, source_key)
        if problem:
            problems.add(row, problem)
        else:
            sources.add(record[source_key])
    problems.raise_if_any(
        "of the wrong shape",
        field=files.names,
        expected=f"{prompt_key}: [{{role, content}}, …] or text; {source_key}: a name; "
        "reward_model: {style, ground_truth}; extra_info: a mapping, if any",
        remedy="mend or remove these rows; rows are counted from 0",
    )
    return tuple(sorted(sources))


def _refuse_empty(files: DataFiles, prompts: Sequence[np.ndarray]) -> None:
    problems = RowProblems(files.where)
    for row, ids in enumerate(prompts):
        if len(ids) == 0:
            problems.add(row, "no tokens")
    problems.raise_if_any(
        "whose prompt has no tokens",
        field=files.names,
        expected="prompts of at least one token",
        remedy="remove these rows, or check the chat template, which writes nothing for them",
    )


def _all_dropped(files: DataFiles, lengths: np.ndarray, limit: int) -> DataError:
    return DataError(
        f"all {len(lengths)} prompts are over the length limit and were filtered out",
        field="data.filter_overlong_prompts",
        got=f"prompts of {lengths.min()} to {lengths.max()} tokens in {files.names}",
        expected=f"at least one of at most {limit} tokens",
        remedy=f"raise data.max_prompt_length (now {limit})",
    )
