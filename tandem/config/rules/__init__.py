"""Rules about several sections of the config. Rules about a single key are declared with the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.check import Rule
from tandem.config.generate import EvalConfig, GenerateConfig, TriedConfig
from tandem.config.root import TrainConfig
from tandem.config.rules import algorithm, engine, placement, rollout
from tandem.config.section import Section
from tandem.config.supervised import RMConfig, SFTConfig

_SUPERVISED = (engine.of_all_engines, placement.supervised_split)
_OFFLINE = (rollout.one_device, rollout.servers)

RULES: Mapping[type[Section], tuple[Rule[Any], ...]] = {
    TrainConfig: (
        engine.of_all_engines,
        placement.placement,
        placement.devices,
        placement.worker_classes,
        placement.model_split,
        placement.rollout_split,
        rollout.servers,
        *rollout.TRAINS,
        algorithm.updates_of_a_batch,
        algorithm.options,
        algorithm.exact_kl,
        *algorithm.PAIRS,
    ),
    SFTConfig: _SUPERVISED,
    RMConfig: _SUPERVISED,
    GenerateConfig: _OFFLINE,
    EvalConfig: _OFFLINE,
    TriedConfig: (),
}
"""A dict from command to its rules."""
