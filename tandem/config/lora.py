"""The rules of a model's keys for low-rank adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.section import Section
from tandem.config.unused import REF, unused_errors
from tandem.config.use import Use
from tandem.errors import ConfigError

_ALL = "all-linear"
_NAMES = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
_POLICY_RANK = "actor_rollout_ref.model.lora_rank"


def lora_rules(at: str) -> list[Rule[Any]]:
    """For the model section at path `at`, whose model is trained."""
    rank, *others = (f"{at}.{name}" for name in _NAMES)
    use: Use[Any] = Use(
        tuple(others), (rank,), lambda config: value_at(config, rank) > 0, f"with {rank} above 0"
    )

    def unused(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        return unused_errors([use], config, changed, frozenset())

    def targets(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        given = value_at(config, f"{at}.target_modules")
        if _ALL in given and len(given) > 1:
            yield ConfigError(
                f"{_ALL} stands beside names of layers",
                field=f"{at}.target_modules",
                got=given,
                expected=f"{_ALL}, or names",
                remedy=f"leave {_ALL} or the names out",
            )

    def folder(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        given = value_at(config, f"{at}.lora_adapter_path")
        if given is not None and not os.path.isfile(os.path.join(given, "adapter_config.json")):
            yield ConfigError(
                "no folder of adapters",
                field=f"{at}.lora_adapter_path",
                got=given,
                expected="a folder with adapter_config.json, as peft and tandem export --adapter write it",
            )

    return [
        Rule((rank, *others), unused),
        Rule((f"{at}.target_modules",), targets),
        Rule((f"{at}.lora_adapter_path",), folder),
    ]


def no_lora(at: str) -> Rule[Any]:
    """For the model section at path `at`, whose model only computes."""
    names = tuple(f"{at}.{name}" for name in _NAMES)
    use: Use[Any] = Use(names, (), lambda config: False, "for a model that is trained")
    return Rule(names, lambda config, changed: unused_errors([use], config, changed, frozenset()))


def reference_is_the_actor(config: TrainConfig) -> bool:
    """Whether the actor's base weights are the reference policy, without a copy of their own."""
    trainer = config.trainer
    together = trainer.placed("ref") == trainer.placed("actor") and "ref" not in trainer.worker_classes
    return config.actor_rollout_ref.model.lora_rank > 0 and together


def second_copy(config: TrainConfig, changed: frozenset[str]) -> Iterator[str]:
    """A sentence on a reference policy that the actor could be."""
    adapted = config.actor_rollout_ref.model.lora_rank > 0
    if adapted and config.needs_reference and not reference_is_the_actor(config):
        yield (
            f"{_POLICY_RANK}: the reference policy is placed apart and holds the base weights a second time; "
            "placed with the actor it needs none of its own."
        )


REFERENCE_NOTICE: Use[TrainConfig] = Use(
    (f"{REF}.fsdp_config.", f"{REF}.ulysses_sequence_parallel_size"),
    (_POLICY_RANK, "trainer.resource_pools", "trainer.placement"),
    lambda config: not reference_is_the_actor(config),
    f"where the reference policy has an engine of its own; with {_POLICY_RANK} above 0 the actor's, without "
    "its adapters, is the reference",
)
