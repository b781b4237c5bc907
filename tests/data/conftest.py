"""A real tokenizer (byte-level BPE in Hugging Face's format) and real data files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if think is defined and think %}"
    "{{ '<think>' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tokenizer with one token per byte, two merges and special tokens.

    The merges are "ab" and newline + "h". No special token is put before texts.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ċ", "h")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


class Files:
    """A writer of data files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parquet(self, rows: list[dict[str, Any]], name: str = "train.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(rows), self.folder / name)
        return str(self.folder / name)

    def text(self, content: str | bytes, name: str) -> str:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(scope="session")
def prompt_row() -> Callable[..., dict[str, Any]]:
    """Return a row in the users' data format; the prompt is one user message unless given."""

    def row(prompt: Any, truth: Any = "1", source: str = "arithmetic", **extra: Any) -> dict[str, Any]:
        return {
            "data_source": source,
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", **extra},
        }

    return row
