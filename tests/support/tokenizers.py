"""Small tokenizers of the common kinds: over bytes, with marks for spaces, and with added tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = ["The answer is The sum of 12 and 7.\n\nThink about it: The user asks, the assistant answers.\n"] * 4
END = "<|end|>"


def _made(core: Tokenizer, markers: Sequence[str], template: str | None) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(marker, normalized=False) for marker in ("<s>", END, *markers)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=END, pad_token="<pad>", chat_template=template
    )


def _trained(splitter: Any, added: Sequence[str], *given: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = splitter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    core.add_tokens(added)
    return _made(core, *given)


def byte_level(markers: Sequence[str] = (), template: str | None = None) -> PreTrainedTokenizerFast:
    """Create a byte-level BPE tokenizer, as Qwen and Llama 3 have, which puts nothing before a text."""
    return _trained(pre_tokenizers.ByteLevel(add_prefix_space=False), [], markers, template)


def metaspace(markers: Sequence[str] = (), template: str | None = None) -> PreTrainedTokenizerFast:
    """Create a tokenizer like SentencePiece: marks for spaces, one before each text, and a begin token."""
    merges = [("T", "h"), ("Th", "e"), ("▁", "The"), ("▁", "a"), ("▁", "▁"), (":", "▁")]
    single = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted({*"".join(_TEXTS), "▁"} - {" "})]
    vocab = {token: at for at, token in enumerate([*single, *map("".join, merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.get_vocab_size())]
    )
    return _made(core, markers, template)


def with_added(markers: Sequence[str] = (), template: str | None = None) -> PreTrainedTokenizerFast:
    """Create a BPE tokenizer over words and spaces, with added tokens that are not special."""
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+|\d|\w+|[^\s\w]+"), "isolated")
    splitter = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    thoughts = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    return _trained(splitter, thoughts, markers, template)


KINDS: dict[str, Callable[..., PreTrainedTokenizerFast]] = {
    "bytes": byte_level,
    "metaspace": metaspace,
    "added": with_added,
}
