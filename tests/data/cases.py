"""Rows in the users' data format, and datasets that are made of rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.errors import DataError

Row = dict[str, Any]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if think is defined and think %}"
    "{{ '<think>' }}{% endif %}{% endif %}"
)


def talk(*contents: str, **fields: Any) -> list[Row]:
    """Return turns of user and assistant alternately; `fields` are added to those of the assistant."""
    return [
        {"role": ("user", "assistant")[n % 2], "content": text, **(fields if n % 2 else {})}
        for n, text in enumerate(contents)
    ]


def chatml(*contents: str) -> str:
    """Return what the template makes of questions: the prompt for the next answer."""
    turns = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
    return turns + "<|im_start|>assistant\n"


def prompt_row(prompt: Any, truth: Any = "1", source: str = "arithmetic", **extra: Any) -> Row:
    """Return a row for RL; a prompt that is text becomes one user message."""
    return {
        "data_source": source,
        "prompt": talk(prompt) if isinstance(prompt, str) else prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", **extra},
    }


def text_row(text: Any, truth: Any = "1") -> Row:
    """Return a row for RL whose prompt is not wrapped in a message."""
    return prompt_row("", truth) | {"prompt": text}


class Files:
    """A writer of data files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parquet(self, rows: list[Row], name: str = "train.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(rows), self.folder / name)
        return str(self.folder / name)

    def text(self, content: str | bytes, name: str) -> str:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


@dataclass
class Data:
    """Makes datasets of one class, from rows or from paths of files, with one tokenizer."""

    dataset: type
    files: Files
    tokenizer: Any

    def __call__(self, rows: Any, **options: Any) -> Any:
        given = isinstance(rows, str) or (rows and isinstance(rows[0], str))
        path = rows if given or rows == [] else self.files.parquet(rows)
        return self.dataset(path, self.tokenizer, **options)

    def refused(self, rows: Any, **options: Any) -> DataError:
        with pytest.raises(DataError) as caught:
            self(rows, **options)
        return caught.value

    def texts(self, tokens: Any) -> list[str]:
        return [self.tokenizer.decode(ids) for ids in tokens]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found
