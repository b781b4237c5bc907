"""Rules that cross sections, by topic. What one key needs is declared with the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.check import Rule
from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.root import TrainConfig
from tandem.config.rules import algorithm, engine, placement, rollout
from tandem.config.section import Section
from tandem.config.supervised import RMConfig, SFTConfig

_SUPERVISED = (engine.supervised_engine, placement.supervised_split)
_OFFLINE = (rollout.one_device, rollout.offline_servers)

RULES: Mapping[type[Section], tuple[Rule[Any], ...]] = {
    TrainConfig: (
        engine.train_engines,
        placement.placement,
        placement.devices,
        placement.worker_classes,
        placement.model_split,
        placement.rollout_split,
        rollout.train_servers,
        rollout.log_probs,
        rollout.second_copy,
        algorithm.group_size,
        algorithm.kl_in_reward,
        algorithm.options,
        algorithm.one_advantage_each,
        algorithm.weighted_once,
        algorithm.updates_of_a_batch,
        algorithm.aggregation,
        algorithm.bypass_loss,
        algorithm.bypassed_forward,
        algorithm.exact_kl,
    ),
    SFTConfig: _SUPERVISED,
    RMConfig: _SUPERVISED,
    GenerateConfig: _OFFLINE,
    EvalConfig: _OFFLINE,
}
"""The rules of each command."""
