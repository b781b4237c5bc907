"""Prompts to answer: read, checked, formatted and tokenised once, before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import plain_messages
from tandem.data.reader import PromptRows, RowCheck
from tandem.data.validate import reward_problem
from tandem.protocol import DataProto, Ragged

UNNAMED = "data"
"""The data source of rows that name none, for metrics."""

RESERVED = ("response", "responses", "completion", "completions", "completion_ids")
"""Names of what the policy writes, in reward functions that read columns by name."""

PARAMETERS = "the parameters or arguments of your reward function"
"""What else names columns."""

_SCORED = {"data_source", "reward_model", "extra_info"}


class PromptDataset:
    """The prompts of one or several data files.

    A row has a prompt, and what the reward reads: unless it says otherwise a data source, which chooses the
    reward, `reward_model` with its `ground_truth`, and perhaps `extra_info`.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        prompt_key: the column of prompts; see `PromptRows`.
        reward_fn_key: the column of data sources.
        needs: the columns that the reward reads; it is given those of such a name that are there, and the
            prompt as "prompt".
        optional: further columns that it reads where they are there; None: all others.
        media_keys: columns that must be empty, where they are there: of images, videos, sounds.
        limits: max_prompt_length, truncation, filter_overlong_prompts, max_samples, chat_template_kwargs:
            see `PromptRows`.

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
        needs: Sequence[str] = ("data_source", "reward_model"),
        optional: Sequence[str] | None = ("extra_info",),
        media_keys: Sequence[str] = (),
        **limits: Any,
    ) -> None:
        scored = "reward_model" in needs
        shape = (
            f"{reward_fn_key}: a name; reward_model: {{style, ground_truth}}; extra_info: a mapping, if any"
        )
        needed, check = reward_columns(needs, prompt_key, reward_fn_key, media_keys)
        rows = PromptRows(
            files,
            tokenizer,
            prompt_key=prompt_key,
            needs=needed,
            optional=None if optional is None else (*optional, *media_keys, reward_fn_key),
            check=check,
            expected=shape if scored else "",
            column_keys=("data.prompt_key", "data.reward_fn_key" if scored else PARAMETERS),
            template_key="actor_rollout_ref.model.custom_chat_template",
            **limits,
        )
        self._files, self._kept = rows.files, rows.kept
        self._prompt_key = prompt_key
        self._source_key = reward_fn_key
        self._by_name = not scored or optional is None or not {*needs, *optional} <= _SCORED
        named = reward_fn_key in rows.files.columns
        self.data_sources = tuple(
            sorted(set(rows.files.table[reward_fn_key].to_pylist() if named else [UNNAMED]))
        )
        self.dropped = rows.dropped
        ids = np.concatenate(rows.prompts).astype(np.int32)
        self.tokens = Ragged.from_lengths(torch.from_numpy(ids), [len(prompt) for prompt in rows.prompts])

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.tokens.lengths.max())

    def batch(self, rows: Sequence[int], *, uid_prefix: str) -> DataProto:
        """A table of the named prompts.

        Args:
            rows: numbers below `len(self)`.
            uid_prefix: the epoch, or "val"; a prompt's uid is "{uid_prefix}-{index}".

        Returns:
            batch["prompts"] Ragged int64; non-tensor uid, data_source, ground_truth, messages (one without
            a role for a text, none for token ids), extra_info, index (the row's number in all files), and
            columns, those of the row by name, where the reward reads them so.
        """
        index = self._kept[np.asarray(rows, dtype=np.int64)]
        records = self._files.take(index)
        prompts = [record[self._prompt_key] for record in records]
        table: dict[str, list[Any]] = {
            "uid": [f"{uid_prefix}-{row}" for row in index],
            "data_source": [record.get(self._source_key, UNNAMED) for record in records],
            "ground_truth": [(record.get("reward_model") or {}).get("ground_truth") for record in records],
            "messages": list(map(_messages, prompts)),
            "extra_info": [record.get("extra_info") or {} for record in records],
            "index": index.tolist(),
        }
        if self._by_name:
            table["columns"] = [
                {**record, "prompt": prompt} for record, prompt in zip(records, prompts, strict=True)
            ]
        return DataProto({"prompts": self.tokens[list(rows)].to(torch.int64)}, table)

    def recall(self, uids: Sequence[str]) -> DataProto:
        """The table of prompts that were in earlier ones, by their uids."""
        index = np.array([int(uid.rpartition("-")[2]) for uid in uids], dtype=np.int64)
        table = self.batch(self.rows_of(index).tolist(), uid_prefix="")
        return DataProto(table.batch, {**table.non_tensor_batch, "uid": list(uids)})

    def rows_of(self, index: np.ndarray) -> np.ndarray:
        """The rows of prompts, by their numbers in the files together."""
        rows: np.ndarray = np.searchsorted(self._kept, index)
        return rows

    def records(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The named prompts as the files hold them: the columns that were read."""
        return self._files.take(self._kept[np.asarray(rows, dtype=np.int64)])


def reward_columns(
    needs: Sequence[str], prompt_key: str, reward_fn_key: str, media_keys: Sequence[str]
) -> tuple[list[str], RowCheck]:
    """The columns that must be there beside the prompt, and what looks at them; see `PromptDataset`."""
    beside = [name for name in needs if name not in ("prompt", prompt_key)]
    needed = [reward_fn_key if name == "data_source" else name for name in beside]
    reserved = RESERVED if prompt_key == "prompt" else ("prompt", *RESERVED)
    scored = partial(reward_problem, reward_fn_key=reward_fn_key)
    problem = scored if "reward_model" in needs else partial(_clash, reserved)
    return needed, lambda row: _media_problem(row, media_keys) or problem(row)


def _clash(reserved: Sequence[str], row: Mapping[str, Any]) -> str | None:
    """A column that a reward function could not be given, for its name means something else there."""
    held = [name for name in reserved if name in row]
    return f"a column is named {held[0]}, as what a reward function is given beside columns" if held else None


def _media_problem(row: Mapping[str, Any], media_keys: Sequence[str]) -> str | None:
    held = [key for key in media_keys if row.get(key)]
    return f"{held[0]}: not empty; models of text alone are trained" if held else None


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "", "content": prompt}]
    return plain_messages(prompt) if isinstance(prompt[0], Mapping) else []
