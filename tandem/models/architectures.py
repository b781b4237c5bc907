"""Which architectures can be trained: those that transformers has for the task, and whose attention gives way
to one over packed sequences."""

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

from tandem.config.model import PLAIN_DECODERS, stored_config
from tandem.errors import ModelError

_OWN_CODE = "auto_map"  # in a config.json: the classes that the folder brings along


def require_known(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuses a folder of a kind that transformers does not have; not one whose config.json is unreadable.

    Raises:
        ModelError: it is of such a kind.
    """
    stored = stored_config(folder)
    kind, own = stored.get("model_type"), _OWN_CODE in stored
    if not stored or kind in CONFIG_MAPPING or (own and trust_remote_code):
        return
    raise _unsupported(
        f"transformers {transformers.__version__} has no such architecture",
        folder,
        stored,
        "set model.trust_remote_code=true to run the code that the folder brings along" if own else None,
    )


def require_task(
    folder: str | Path, config: PreTrainedConfig, *, scorer: bool = False, trust_remote_code: bool = False
) -> Any:
    """The class of the model that the folder holds, for the task.

    Args:
        config: what `load_config` gives of the folder.
        scorer: whether a classifier is asked for, and not a causal language model.

    Returns:
        a class of transformers; None where the folder's own code says it.

    Raises:
        ModelError: transformers has no such model of this architecture.
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
    """Refuses an architecture that has no training on packed sequences: its attention is its own, or it hands
    a state from token to token beside it. Of the folder's own code only trying tells.

    Args:
        config, scorer: see `require_task`.

    Raises:
        ModelError: see `require_task`; also an architecture of that kind.
    """
    model = require_task(folder, config, scorer=scorer, trust_remote_code=trust_remote_code)
    if model is not None and not model.is_backend_compatible():
        raise _unsupported(
            "the model's architecture cannot be trained on packed sequences", folder, config.to_dict()
        )


def auto_class(config: PreTrainedConfig, *, scorer: bool) -> Any:
    """What loads a model for the task; see `require_task`."""
    return _task_of(config, scorer=scorer)[2]


def architecture_of(config: PreTrainedConfig) -> str:
    """The first architecture that a folder's config names."""
    return str((getattr(config, "architectures", None) or ["none named"])[0])


def judges_tokens(config: PreTrainedConfig) -> bool:
    """Whether a folder's config is that of a token classifier."""
    return architecture_of(config).endswith("ForTokenClassification")


def _task_of(config: PreTrainedConfig, *, scorer: bool) -> tuple[str, Any, Any]:
    """Return the task in words, transformers' classes for it by config, and what loads a model for it."""
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
        expected="a model of transformers whose attention its AttentionInterface can exchange, such as "
        + ", ".join(PLAIN_DECODERS),
        remedy=remedy or "train another model: every rollout engine samples the one that is trained",
    )
