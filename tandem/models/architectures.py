"""Checks whether Tandem can train a model's architecture, and whether it can pack sequences.

Tandem can train an architecture if transformers has a model class for the task. Sequences are packed into one
row if the model's attention can be replaced by attention over packed sequences. Otherwise each sequence gets
a row of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from tandem.config.changed_models import stored_config
from tandem.config.model import PLAIN_DECODERS
from tandem.errors import ModelError

_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# Model types that compute positions or masks from the token ids of a row.
_OWN_ROWS = (
    *("camembert", "data2vec-text", "doge", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
)
_OWN_CODE = "auto_map"  # a key of config.json that says that the folder contains model classes


def require_known(folder: Path, *, trust_remote_code: bool) -> None:
    """Check that transformers knows the `model_type` of a folder.

    A folder whose config.json is unreadable passes this check.

    Args:
        folder: the model's folder.
        trust_remote_code: whether the folder's code may run; if so, this code defines the architecture.

    Raises:
        ModelError: If transformers does not know the `model_type`.
    """
    stored = stored_config(folder)
    kind, own = stored.get("model_type"), _OWN_CODE in stored
    if not stored or kind in CONFIG_MAPPING or (own and trust_remote_code):
        return
    raise _unsupported(
        f"transformers {transformers.__version__} does not know this architecture",
        folder,
        stored,
        "set model.trust_remote_code=true to run the code that the folder brings along" if own else None,
    )


def require_task(
    folder: str | Path, config: PreTrainedConfig, *, scorer: bool = False, trust_remote_code: bool = False
) -> Any:
    """Return the model class of a folder for language modeling or for scoring.

    Args:
        folder: the model's folder.
        config: the folder's config, from `load_config`.
        scorer: whether the task needs a classifier instead of a causal language model.
        trust_remote_code: whether the folder's code may run.

    Returns:
        A class of transformers; None if the folder's code defines the class.

    Raises:
        ModelError: If transformers has no model of this architecture for the task.
    """
    if trust_remote_code and hasattr(config, _OWN_CODE):
        return None
    task, models, _ = _task_of(config, scorer=scorer)
    found = models.get(type(config), None)
    if found is None:
        raise _unsupported(f"the model's architecture cannot be loaded as {task}", folder, config.to_dict())
    try:
        config.get_text_config()
    except ValueError as error:  # for example, a text encoder beside the decoder
        problem = "the model has several text models, and transformers does not say which is trained"
        raise _unsupported(problem, folder, config.to_dict()) from error
    return found[0] if isinstance(found, tuple) else found


def may_pack(model: Any, config: PreTrainedConfig) -> bool:
    """Return whether the model can be trained on sequences that are packed into one row.

    It can if all its layers are attention layers whose attention function can be replaced. Other layers, such
    as convolutions and recurrences, pass a state from token to token. Then each sequence needs a row of its
    own.

    Args:
        model: the model class from `require_task`. None if the folder's code defines the class. Then only a
            trial run shows whether packing works.
        config: the folder's config, from `load_config`.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    alone = text.model_type in _OWN_ROWS or any(kind not in _ATTENTION_LAYERS for kind in kinds)
    return model is None or (model.is_backend_compatible() and not model._is_stateful and not alone)


def rows_attention(model: Any, config: PreTrainedConfig) -> str:
    """Return the name of transformers' attention for a model whose sequences have rows of their own.

    Only "eager" has the sinks and soft caps of attention scores.
    """
    capped = field_of(config.get_text_config(), "attn_logit_softcapping")
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def field_of(config: Any, name: str) -> Any:
    """Return a field of a config; None if it does not exist. Some layers may have another value."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def head_width(config: PreTrainedConfig) -> int:
    """Return the number of features of an attention head."""
    text = config.get_text_config()
    width: int = field_of(text, "head_dim") or field_of(text, "hidden_size") // text.num_attention_heads
    return width


def auto_class(config: PreTrainedConfig, *, scorer: bool) -> Any:
    """Return the auto class of transformers that loads a model for the task; see `require_task`."""
    return _task_of(config, scorer=scorer)[2]


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the first architecture that a folder's config names."""
    return str((getattr(config, "architectures", None) or ["none named"])[0])


def judges_tokens(config: PreTrainedConfig) -> bool:
    """Return whether the config belongs to a token classifier."""
    return architecture_of(config).endswith("ForTokenClassification")


def _task_of(config: PreTrainedConfig, *, scorer: bool) -> tuple[str, Any, Any]:
    """Return the task's name, transformers' dict from config class to model class, and the auto class."""
    if not scorer:
        return "a causal language model", MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    if judges_tokens(config):
        return "a token classifier", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification
    models = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return "a sequence classifier", models, AutoModelForSequenceClassification


def _unsupported(
    problem: str, folder: str | Path, stored: dict[str, Any], remedy: str | None = None
) -> ModelError:
    architecture = ", ".join(stored.get("architectures") or ["none named"])
    return ModelError(
        problem,
        field="model.path",
        got=f"{folder}: architecture {architecture}, model_type {stored.get('model_type')}",
        expected="a model of transformers that uses its AttentionInterface, such as "
        + ", ".join(PLAIN_DECODERS),
        remedy=remedy or "train another model; another rollout engine does not help",
    )
