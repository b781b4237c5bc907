"""Checks whether models that read the policy's responses have the policy's vocabulary.

Such a model reads the policy's token ids, or text if its vocabulary is different.
"""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.config.generate import EvalModelConfig, SampledModelConfig
from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.models.loading import TOKENIZER_FILES, load_config, load_tokenizer

_MULTIPLE = 64
"""A proposed number of rows of an embedding is a multiple of this number, so that devices can share it."""


def check_vocabulary(
    path: str | Path,
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str,
    trust_remote_code: bool = False,
) -> None:
    """Check that a model can read the policy's token ids.

    Args:
        path: the model's folder.
        vocabulary: the number of token ids of the model.
        tokenizer: the policy's tokenizer.
        field: the config key that names the folder.
        trust_remote_code: whether to run the tokenizer code in the folder.

    Raises:
        ModelError: If the model has fewer ids than the tokenizer, or if some tokens have other ids in the
            folder's tokenizer.
    """
    check_size(path, vocabulary, tokenizer, field=field)
    own = _tokenizer_in(path, trust_remote_code=trust_remote_code)
    other = [] if own is None else other_ids(tokenizer, own)
    if other:
        raise ModelError(
            "the model's tokenizer is not the policy's",
            field=field,
            got=f"{path}: {len(other)} tokens with other ids, such as {other[0]!r}",
            expected="the same ids, because the model reads the policy's tokens",
            remedy="use a model that has the policy's tokenizer",
        )


def check_size(path: str | Path, vocabulary: int, tokenizer: PreTrainedTokenizerBase, *, field: str) -> None:
    """Check that a model's vocabulary has all token ids of the tokenizer; see `check_vocabulary`."""
    asked = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if vocabulary < asked:
        section, rows = field.rpartition(".")[0], -(-asked // _MULTIPLE) * _MULTIPLE
        resizes = section.endswith("model")
        resize = f"set {section}.resize_embeddings={rows} to add rows, or " if resizes else ""
        raise ModelError(
            "the model's vocabulary is smaller than that of the tokenizer",
            field=field,
            got=f"{path}: {vocabulary} tokens",
            expected=f">= {asked}",
            remedy=f"{resize}use a model that has this tokenizer, or put the model's own tokenizer into its "
            "folder",
        )


def check_reader(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, field: str, trust_remote_code: bool = False
) -> None:
    """Check that the model in a folder has all token ids of the tokenizer; see `check_size`."""
    text = load_config(path, trust_remote_code=trust_remote_code).get_text_config()
    check_size(path, text.vocab_size, tokenizer, field=field)


def tokenizer_of(
    model: ModelConfig | SampledModelConfig | EvalModelConfig, at: str = "model"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a config names, and check that the model has all its token ids.

    Args:
        model: the config section of the model.
        at: the section's key, for messages.

    Raises:
        ModelError: see `load_tokenizer` and `check_size`.
    """
    assert model.path is not None and model.tokenizer_path is not None
    tokenizer = load_tokenizer(
        model.tokenizer_path,
        custom_chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )
    check_reader(
        model.path, tokenizer, field=f"{at}.tokenizer_path", trust_remote_code=model.trust_remote_code
    )
    return tokenizer


def tokenizer_of_scorer(
    path: str | Path,
    policys: PreTrainedTokenizerBase,
    *,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase | None:
    """Load a reward model's tokenizer if the model cannot read the policy's token ids.

    Args:
        path: the reward model's folder.
        policys: the policy's tokenizer.
        tokenizer_path: another folder with the reward model's tokenizer.
        chat_template: a chat template to use instead of the folder's template.
        trust_remote_code: whether to run the tokenizer code in the folder.

    Returns:
        The tokenizer; None if the reward model can read the policy's ids. It can if the policy's tokens have
        the same ids in its tokenizer, and if its chat template is missing or the same.

    Raises:
        ModelError: see `load_tokenizer`.
    """
    own = _tokenizer_in(tokenizer_path or path, trust_remote_code=trust_remote_code)
    own = copy.deepcopy(policys) if own is None else own
    if chat_template is not None:
        own.chat_template = chat_template
    same_template = own.chat_template in (None, policys.chat_template)
    return None if same_template and not other_ids(policys, own) else own


def other_ids(policys: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> list[str]:
    """Return the sorted tokens of the policy that have a different id in the other tokenizer."""
    ours, theirs = policys.get_vocab(), own.get_vocab()
    return sorted(token for token, index in ours.items() if theirs.get(token, index) != index)


def _tokenizer_in(folder: str | Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    if not any((Path(folder).expanduser() / name).is_file() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(folder, trust_remote_code=trust_remote_code)
