"""Functions that load models and tokenizers from local Hugging Face folders."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tandem.errors import IncompleteModelError, ModelError
from tandem.models.angles import fit_angles
from tandem.models.architectures import (
    architecture_of,
    auto_class,
    judges_tokens,
    require_known,
    require_task,
)
from tandem.models.attention import PACKED
from tandem.models.changed_fields import misfit, require_fields
from tandem.models.decoders import decoder_of, head_of, layers_of
from tandem.models.experts import EXPERTS
from tandem.models.linear import speed_up_linears
from tandem.models.logits import LogitRule
from tandem.models.routing import Mixtures

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_RANDOM = ("drop", "jitter")
_unfit = partial(ModelError, field="model.path")
_incomplete = partial(IncompleteModelError, field="model.path")
_COPY_AGAIN = "copy or download the folder again"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of a model's folder, and set every dropout to zero.

    Raises:
        ModelError: If the folder does not exist, its config.json is missing or unreadable, or transformers
            does not know the architecture.
    """
    folder = _folder(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        require_known(folder, trust_remote_code=trust_remote_code)
        unusable = _unusable("the model's config.json cannot be used", folder, error)
        raise misfit(folder, str(error)) or unusable from error
    require_fields(folder, config)
    _drop_nothing(config)
    return config


def _drop_nothing(config: PreTrainedConfig) -> None:
    """Set every dropout and jitter to zero, also in nested configs: they would make log-probs random."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _drop_nothing(value)
        elif (
            any(word in name for word in _RANDOM)
            and isinstance(value, (int, float))
            and value is not True
            and 0 < value <= 1
        ):
            setattr(config, name, 0.0)


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    attention: str = PACKED,
    weights: bool = True,
) -> PreTrainedModel:
    """Load the causal language model of a folder, in training mode.

    Args:
        path: folder with config.json and safetensors (or pytorch_model.bin) weights.
        dtype: the dtype of the parameters.
        device: the device for the parameters.
        trust_remote_code: whether to run the model code in the folder.
        attention: name of the attention function.
        weights: whether to load the weights. If not, the parameters are on the meta device and the buffers on
            the host, and `device` is ignored.

    Raises:
        ModelError: see `load_config`; also if the folder has no weights, if the weights do not match the
            architecture, or if `require_trainable` fails.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": trust_remote_code}
    model = _build(path, config, options, scorer=False, weights=weights)
    policy: PreTrainedModel = (model.to(device) if weights else model).train()
    return policy


def load_scorer(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    attention: str = PACKED,
    new_head: bool = False,
    weights: bool = True,
) -> PreTrainedModel:
    """Load the reward model of a folder, in evaluation mode.

    The model is a sequence classifier with one label, or a token classifier with one or two labels.

    Args:
        path: folder with config.json and safetensors (or pytorch_model.bin) weights.
        dtype: the dtype of the parameters.
        trust_remote_code: whether to run the model code in the folder.
        attention: name of the attention function.
        new_head: whether to accept the folder of a causal language model too. Such a model gets a new head
            with random weights, seeded by the last call of `torch.manual_seed`.
        weights: see `load_policy`.

    Raises:
        ModelError: see `load_policy`; also if the folder contains another type of model, or a classifier with
            more labels.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    new_head = new_head and lacks_score_head(config)
    if new_head:
        config.num_labels = 1
    else:
        require_scorer(path, config)
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": trust_remote_code}
    absent: Collection[str] = {"score.weight"} if new_head else ()
    model = _build(path, config, options, scorer=True, weights=weights, absent=absent)
    if new_head and weights:
        # As in Stiennon et al. 2020 (arXiv 2009.01325), so that the first rewards are of order one. The
        # random head is created in fp32 with a separate generator, so that it is the same in every precision.
        drawn = torch.empty(model.score.weight.shape, dtype=torch.float32)
        std = (config.get_text_config().hidden_size + 1) ** -0.5
        nn.init.normal_(drawn, std=std, generator=torch.Generator().manual_seed(torch.initial_seed()))
        model.score.weight.detach().copy_(drawn)
    scorer: PreTrainedModel = model.eval()
    return scorer


def require_scorer(
    path: str | Path, config: PreTrainedConfig, field: str = "reward_model.model.path"
) -> None:
    """Check that a folder contains a reward model.

    A reward model is a sequence classifier with one label, or a token classifier with one or two labels.

    Args:
        path: the model's folder.
        config: the folder's config, from `load_config`.
        field: the config key that names the folder.

    Raises:
        ModelError: If the folder contains another type of model.
    """
    architecture, by_token = architecture_of(config), judges_tokens(config)
    if not (by_token or architecture.endswith("ForSequenceClassification")):
        raise ModelError(
            "the folder does not hold a reward model",
            field=field,
            got=f"{path}: architecture {architecture}",
            expected="a sequence classifier, such as Qwen2ForSequenceClassification",
            remedy="name the folder of a trained reward model",
        )
    if config.num_labels not in ((1, 2) if by_token else (1,)):
        raise ModelError(
            "a reward model must return one score",
            field=field,
            got=f"{path}: num_labels {config.num_labels}",
            expected="num_labels 1, or 2 for a token classifier",
            remedy="use a model that was trained with this number of labels",
        )


def positions_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of a config that `position_limit` reads, by the names of a config.json."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in ("max_position_embeddings", "rope_parameters")}


def lacks_score_head(config: PreTrainedConfig) -> bool:
    """Return whether the checkpoint is a causal language model, which has no score head."""
    return architecture_of(config).endswith("ForCausalLM")


def _build(
    path: str | Path,
    config: PreTrainedConfig,
    options: dict[str, Any],
    *,
    scorer: bool,
    weights: bool,
    absent: Collection[str] = (),
) -> Any:
    """Build a model, and check that it can be trained for the task.

    Args:
        path: the model's folder.
        config: the folder's config.
        options: keyword arguments of the auto class.
        scorer: whether the task needs a classifier.
        weights: whether to load the folder's weights.
        absent: the names of weights that may be missing in the folder.
    """
    require_task(path, config, scorer=scorer, trust_remote_code=options["trust_remote_code"])
    config._experts_implementation = EXPERTS
    kind = auto_class(config, scorer=scorer)
    model = _load(kind, path, config, absent, options) if weights else _skeleton(kind, path, config, options)
    require_trainable(model, scorer=scorer)
    speed_up_linears(model)
    fit_angles(model)
    model.mixtures = Mixtures(model)
    return model


def _load(
    kind: Any, path: str | Path, config: PreTrainedConfig, absent: Collection[str], options: dict[str, Any]
) -> Any:
    """Load a model with its weights. Only the weights named in `absent` may be missing."""
    folder = _folder(path)
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        raise _unfit(
            "the model folder contains no weights",
            got=folder,
            expected=" or ".join(_WEIGHT_FILES),
            remedy=_COPY_AGAIN,
        )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = transformers_logging.get_verbosity()
    # Silence warnings about missing weights. The code below checks them.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the check below names all mismatches
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, UnpicklingError) as error:
        raise _unusable("the model's weights cannot be loaded", folder, error) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    wrong = [
        f"{name} is {_shape(held)}, but config.json asks for {_shape(asked)}"
        for name, held, asked in sorted(report["mismatched_keys"], key=str)
    ]
    if wrong:
        raise misfit(folder, wrong[0]) or _unfit(
            "the shapes of the weights differ from those in config.json",
            got=f"{folder}: {len(wrong)} weights, such as {wrong[0]}",
            remedy="put the config.json that belongs to these weights into the folder",
        )
    missing = sorted(set(report["missing_keys"]).difference(absent))
    if missing:
        raise misfit(folder, f"{missing[0]} is missing") or _unfit(
            "weights are missing",
            got=f"{folder}: {len(missing)}, such as {missing[0]}",
            remedy="export the model again with all of its weights",
        )
    return model


def _skeleton(kind: Any, path: str | Path, config: PreTrainedConfig, options: dict[str, Any]) -> Any:
    """Build the model without loading weights.

    Parameters are on the meta device. Buffers have the values that the architecture computes.
    """
    try:
        with torch.device("meta"):
            model = kind.from_config(config, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unusable("the model cannot be built", _folder(path), error) from error
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()  # only the buffers, because parameters are marked
    return model


def load_tokenizer(
    path: str | Path, *, custom_chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder.

    If it has no padding token, the end-of-sequence token is used for padding.

    Args:
        path: the tokenizer's folder.
        custom_chat_template: a Jinja template to use instead of the folder's template.
        trust_remote_code: whether to run the tokenizer code in the folder.

    Raises:
        ModelError: If the folder has no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    folder = Path(path).expanduser()
    if not trust_remote_code and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        # Without these files, transformers may create an empty tokenizer.
        raise _incomplete(
            "the folder contains no tokenizer",
            got=folder,
            expected=" or ".join(TOKENIZER_FILES),
            remedy="copy the tokenizer's files there, or set model.tokenizer_path to their folder",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable("the folder's tokenizer cannot be loaded", folder, error) from error
    if tokenizer.eos_token_id is None:
        raise _unfit(
            "the tokenizer has no end-of-sequence token",
            got=folder,
            remedy='set "eos_token" in tokenizer_config.json',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    return tokenizer


def _unusable(problem: str, folder: Path, error: Exception) -> ModelError:
    return _incomplete(problem, got=f"{folder}: {error}", remedy=_COPY_AGAIN)


def _shape(sizes: Iterable[int]) -> str:
    return " × ".join(map(str, sizes))


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise _unfit("the model folder does not exist", got=path, remedy="check the path")
    if not (folder / "config.json").is_file():
        raise _incomplete(
            "the folder is not a Hugging Face model",
            got=folder,
            expected="a folder with a config.json",
            remedy="check the path",
        )
    return folder


def require_trainable(model: Any, *, scorer: bool = False) -> None:
    """Check that a model has the module structure that training needs.

    Args:
        model: a model of transformers.
        scorer: whether the model is a classifier instead of a causal language model.

    Raises:
        ModelError: If the head is not one linear layer, or the decoder has no list of layers.
    """
    head = head_of(model)
    if not isinstance(head, nn.Linear):
        raise ModelError(
            "the model's head is not one linear layer over a decoder",
            field="reward_model.model.path" if scorer else "model.path",
            got=f"{model.config.name_or_path}: {type(model).__name__} with {type(head).__name__}",
            expected="a linear layer `score`" if scorer else "a linear layer with one row per token id",
            remedy="train another model",
        )
    if not scorer:
        LogitRule.of(model.config)
    decoder = decoder_of(model)
    if layers_of(decoder) is None:
        raise _unfit(
            "the model's decoder has no list of layers",
            got=f"{type(model).__name__}: {type(decoder).__name__}",
            expected="a list of num_hidden_layers layers, as in Qwen2, Qwen3 and Llama",
            remedy="train another model",
        )
