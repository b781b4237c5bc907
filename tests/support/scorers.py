"""Tiny reward models, created from scratch, in Hugging Face formats."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tests.support.tiny import CHARACTERS

OTHER_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}.{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>"
    "{% endif %}?{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
)


def make_scorer(
    folder: Path, policy: Path, *, seed: int = 5, by_token: bool = False, labels: int = 1, **changes: Any
) -> Path:
    """Create a random classifier of the policy's sizes, without a tokenizer."""
    torch.manual_seed(seed)
    config = Qwen2Config.from_pretrained(policy, num_labels=labels, vocab_size=64, **changes)
    classifier = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    model = classifier.from_config(config)
    if by_token:
        torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    return folder


def make_other_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Create a tokenizer with other ids and another template, whose tokens may be two letters."""
    names = ["<pad>", "<end>", "<unk>", *reversed(CHARACTERS), "ab", "12", "34"]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("ab|12|34|."), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = OTHER_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
