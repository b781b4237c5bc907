"""Models and tokenizers from local Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tandem.errors import ModelError
from tandem.models.attention import PACKED
from tandem.models.linear import speed_up_linears

# Knobs that would make log-probs random, and outputs that our head does not compute.
_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
_HEAD_EXTRAS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_COPY_AGAIN = "copy or download the folder again"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config, with every dropout at zero.

    Raises:
        ModelError: no such folder, no or an unreadable config.json, an unknown architecture.
    """
    folder = _folder(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise _unusable("the model's config.json cannot be used", folder, error) from error
    for name in _DROPOUTS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return config


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    attention: str = PACKED,
) -> PreTrainedModel:
    """The causal language model of a folder, in training mode.

    Args:
        path: folder with config.json and safetensors (or pytorch_model.bin) weights.
        dtype: of the parameters.
        device: where they go.
        trust_remote_code: run the model class that the folder brings along.
        attention: name of the attention function.

    Raises:
        ModelError: see `load_config`; also no weights, weights that do not fit the architecture, or a
            head that is not one plain matrix.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    folder = _folder(path)
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise ModelError(
            "the model folder holds no weights",
            field="model.path",
            got=folder,
            expected=" or ".join(_WEIGHT_FILES),
            remedy=_COPY_AGAIN,
        )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, UnpicklingError) as error:
        raise _unusable("the model's weights cannot be loaded", folder, error) from error
    model, report = loaded
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ModelError(
            "weights are missing or have another shape",
            field="model.path",
            got=f"{folder}: {len(missing)}, such as {missing[0]}",
            remedy="export the model again, with all of its weights",
        )
    _check_head(model)
    speed_up_linears(model)
    policy: PreTrainedModel = model.to(device).train()
    return policy


def load_tokenizer(
    path: str | Path, *, custom_chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; where it names no padding token, that is its end of sequence.

    Args:
        custom_chat_template: a Jinja template to use instead of the folder's own.

    Raises:
        ModelError: no tokenizer there, or one without an end-of-sequence token.
    """
    folder = Path(path).expanduser()
    if not trust_remote_code and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        # Asked for one that is not there, transformers may make up an empty tokenizer.
        raise ModelError(
            "the folder holds no tokenizer",
            field="model.path",
            got=folder,
            expected=" or ".join(_TOKENIZER_FILES),
            remedy="copy the tokenizer's files there, or name their folder with model.tokenizer_path",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable("the folder's tokenizer cannot be loaded", folder, error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token",
            field="model.path",
            got=folder,
            remedy='set "eos_token" in tokenizer_config.json',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    return tokenizer


def _unusable(problem: str, folder: Path, error: Exception) -> ModelError:
    return ModelError(problem, field="model.path", got=f"{folder}: {error}", remedy=_COPY_AGAIN)


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError("no such model folder", field="model.path", got=path, remedy="check the path")
    if not (folder / "config.json").is_file():
        raise ModelError(
            "the folder is no Hugging Face model",
            field="model.path",
            got=folder,
            expected="a config.json in it",
            remedy="check the path",
        )
    return folder


def _check_head(model: Any) -> None:
    head = model.get_output_embeddings()
    extras = [name for name in _HEAD_EXTRAS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if head is None or getattr(head, "bias", None) is not None or extras:
        raise ModelError(
            "the model's output head is not one plain matrix",
            field="model.path",
            got=", ".join(extras) or type(head).__name__,
            expected="logits = hidden · weightᵀ, as in Qwen2, Qwen3 and Llama",
        )
