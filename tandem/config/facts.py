"""Functions that return facts about a config: its engines, its models and their sizes.

The sizes come from the model's folder. This module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tandem.config.changed_models import stored_config
from tandem.config.model import SHARED_OUT, BackboneConfig
from tandem.config.root import TrainConfig
from tandem.config.supervised import SupervisedConfig

POLICY = "actor_rollout_ref"


class Engine(NamedTuple):
    """A training engine that a config describes, whether or not the run uses it.

    Attributes:
        at: the dotted path of the engine's section; "" at the root.
        section: the engine's section, which has `fsdp_config`.
        model_at: the dotted path of the section of the engine's model.
        model: the section of the engine's model.
    """

    at: str
    section: Any
    model_at: str
    model: BackboneConfig

    def key(self, name: str) -> str:
        """Return the dotted path of a key of the engine's section."""
        return f"{self.at}.{name}" if self.at else name


class Model(NamedTuple):
    """A model that a run loads.

    Attributes:
        role: one of `TrainConfig.roles`; "" for the only model of a supervised run.
        engine: the engine that runs the model.
        path: the folder of the model.
    """

    role: str
    engine: Engine
    path: str


def engines(config: TrainConfig | SupervisedConfig) -> Mapping[str, Engine]:
    """Return a dict from role to engine. Several models of one role share an engine."""
    if isinstance(config, SupervisedConfig):
        return {"": Engine("", config, "model", config.model)}
    policy, critic, scorer = config.actor_rollout_ref, config.critic, config.reward_model
    return {
        "actor": Engine(f"{POLICY}.actor", policy.actor, f"{POLICY}.model", policy.model),
        "ref": Engine(f"{POLICY}.ref", policy.ref, f"{POLICY}.model", policy.model),
        "critic": Engine("critic", critic, "critic.model", critic.model),
        "reward_model": Engine("reward_model", scorer, "reward_model.model", scorer.model),
    }


def models(config: TrainConfig | SupervisedConfig) -> Iterator[Model]:
    """Yield the models of a run.

    The generator reads the keys of a model just before it yields the model. So if a later value is invalid,
    the models before it are still yielded (see `tandem.config.view`).
    """
    every = engines(config)
    if isinstance(config, SupervisedConfig):
        yield Model("", every[""], config.model.path)
        return
    policy = config.actor_rollout_ref
    yield Model("actor", every["actor"], policy.model.path)
    if config.needs_critic:
        yield Model("critic", every["critic"], config.critic.model.path)
    for role, scorer in config.reward_model.scorers.items():
        yield Model(role, every["reward_model"], scorer.path)
    for role, term in policy.ref.references.items() if config.needs_reference else ():
        yield Model(role, every["ref"], term.path or policy.model.path)


def size_of(path: str, name: str) -> int | None:
    """Return a size from the model's config.json; None if the file is unreadable."""
    count = _text_config(path).get(name)
    return count if isinstance(count, int) else None


def type_of(path: str) -> str | None:
    """Return the model_type of the language model in a folder; None if config.json does not say it."""
    kind = _text_config(path).get("model_type")
    return kind if isinstance(kind, str) else None


def _text_config(path: str) -> dict[str, Any]:
    stored = stored_config(path)
    text = stored.get("text_config", stored)
    return text if isinstance(text, dict) else {}


def uneven(path: str, parts: int, *, leave_out: Collection[str] = ()) -> str:
    """Describe the sizes of a model that are not divisible by `parts` devices; return "" if all are."""
    sizes = {name: size_of(path, name) for name in SHARED_OUT if name not in leave_out}
    return ", ".join(
        f"{name} {count}" for name, count in sizes.items() if count is not None and count % parts
    )
