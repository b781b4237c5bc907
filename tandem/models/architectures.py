"""Checks whether Tandem can train a model's architecture.

Tandem can train an architecture if transformers has a model class for the task, and if the model's attention
can be replaced by attention over packed sequences.
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
    return found[0] if isinstance(found, tuple) else found


def require_packable(
    folder: str | Path, config: PreTrainedConfig, *, scorer: bool = False, trust_remote_code: bool = False
) -> None:
    """Check that the architecture can be trained on packed sequences.

    Training is impossible if the architecture's attention cannot be replaced, or if the architecture passes a
    state from token to token outside attention. A folder with custom model code passes this check, because
    only a trial run shows whether the code supports packing.

    Args:
        folder: the model's folder.
        config: the folder's config, from `load_config`.
        scorer: see `require_task`.
        trust_remote_code: see `require_task`.

    Raises:
        ModelError: If the architecture cannot be trained on packed sequences; also see `require_task`.
    """
    model = require_task(folder, config, scorer=scorer, trust_remote_code=trust_remote_code)
    if model is not None and not model.is_backend_compatible():
        raise _unsupported(
            "the model's architecture cannot be trained on packed sequences", folder, config.to_dict()
        )


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
