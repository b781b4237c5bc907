"""Small models, tokenizers and data files, created from scratch, in Hugging Face formats."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= abcdefghijklmnopqrstuvwxyz?."
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_tokenizer(folder: Path, *, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per character; <pad> and <eos> come first."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    raw.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(
    folder: Path, *, kind: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Create a random causal LM of this model type, of a few thousand parameters, with its tokenizer."""
    tokenizer = make_tokenizer(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes |= {"bos_token_id": None, "vocab_size": len(tokenizer), "initializer_range": 0.2}
    sizes |= ({"head_dim": 8} if kind == "qwen3" else {}) | changes
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes), dtype=dtype).save_pretrained(folder)
    return folder


def problem(a: int, b: int, split: str = "train") -> dict[str, Any]:
    question = f"{a}+{b}="
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": a * 100 + b, "answer": str(a + b), "question": question},
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_problems(folder: Path, train: int = 24, val: int = 8) -> tuple[Path, Path]:
    pairs = [(a, b) for a in range(3, 60, 4) for b in range(2, 9)]
    rows = [problem(a, b) for a, b in pairs[: train + val]]
    parts = {"train": rows[:train], "val": rows[train:]}
    found, held_out = (write_rows(folder / f"{name}.parquet", part) for name, part in parts.items())
    return found, held_out
