"""Write the demo's model as a Hugging Face folder.

The model is an untrained Qwen2 of about a million parameters, with a tokenizer of one token per byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

END = "<|endoftext|>"
PADDING = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The chat template: it concatenates the contents of messages, with an end token after each answer."""


def build_tokenizer(phrases: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Return Qwen2's byte-level tokenizer without merges.

    The tokenizer has one token per byte (so one token per ASCII character) and one token for each phrase.
    """
    bytes_as_characters = sorted(ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate((END, PADDING, *bytes_as_characters))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token=END, pad_token=PADDING)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """Return a Qwen2 of 1.06 million parameters with random weights.

    Args:
        tokenizer: the tokenizer, which determines the vocabulary size.
        seed: seed of the weights.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=128**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen2ForCausalLM = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def write_model(folder: Path, *, seed: int, phrases: Sequence[str] = ()) -> None:
    """Save tokenizer and model in Hugging Face's format.

    Args:
        folder: created if it does not exist.
        seed: seed of the weights.
        phrases: texts that become one token each.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = build_tokenizer(phrases)
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, seed=seed).save_pretrained(folder)
