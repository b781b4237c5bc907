"""What follows from a config, in one place: the engines and the models of a run, and what the folder of a
model says of its sizes. PyTorch is not loaded for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tandem.config.model import SHARED_OUT, BackboneConfig, stored_config
from tandem.config.root import TrainConfig
from tandem.config.supervised import SupervisedConfig

POLICY = "actor_rollout_ref"


class Engine(NamedTuple):
    """A training engine of a config, whether or not the run has it.

    Attributes:
        at: where its section lies; empty: at the root.
        section: that section, with `fsdp_config`.
        model_at: where the section of its model lies.
        model: that section.
    """

    at: str
    section: Any
    model_at: str
    model: BackboneConfig

    def key(self, name: str) -> str:
        """Return the dotted path of a key of its section."""
        return f"{self.at}.{name}" if self.at else name


class Model(NamedTuple):
    """A model that a run loads.

    Attributes:
        role: of `TrainConfig.roles`; empty: the only one of a supervised run.
        engine: what runs it.
        path: its folder.
    """

    role: str
    engine: Engine
    path: str


def engines(config: TrainConfig | SupervisedConfig) -> Mapping[str, Engine]:
    """Return the engines of a config, by role; several models of a role have the same."""
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
    """Yield the models of a run. A key is read where its model comes: the view of a config that has a wrong
    value gives those before it."""
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
    """Return a size that the model's folder says; None where it cannot be read, which others report."""
    stored = stored_config(path)
    count = stored.get("text_config", stored).get(name)
    return count if isinstance(count, int) else None


def uneven(path: str, parts: int, *, leave_out: Collection[str] = ()) -> str:
    """Return in words the sizes of a model that so many devices cannot share; empty if there are none."""
    sizes = {name: size_of(path, name) for name in SHARED_OUT if name not in leave_out}
    return ", ".join(
        f"{name} {count}" for name, count in sizes.items() if count is not None and count % parts
    )
