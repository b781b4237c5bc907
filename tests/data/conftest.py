"""A real tokenizer (byte-level BPE in Hugging Face's format) and real data files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tandem.data.preferences import PreferenceDataset
from tandem.data.prompts import PromptDataset
from tandem.data.sft import SFTDataset
from tests.data.cases import CHATML, Data, Files


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
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=["<|im_start|>"], chat_template=CHATML, **special
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def prompts(files: Files, tokenizer: PreTrainedTokenizerBase) -> Data:
    return Data(PromptDataset, files, tokenizer)


@pytest.fixture
def demonstrations(files: Files, tokenizer: PreTrainedTokenizerBase) -> Data:
    return Data(SFTDataset, files, tokenizer)


@pytest.fixture
def pairs(files: Files, tokenizer: PreTrainedTokenizerBase) -> Data:
    return Data(PreferenceDataset, files, tokenizer)
