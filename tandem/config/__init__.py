"""The config: typed sections, loading, checking, explaining. Imports no torch."""

from tandem.config.batching import Batching
from tandem.config.explain import explain
from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.load import (
    Loaded,
    load_eval_config,
    load_generate_config,
    load_rm_config,
    load_sft_config,
    load_train_config,
    to_dict,
    to_yaml,
)
from tandem.config.root import TrainConfig
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments
from tandem.config.supervised import RMConfig, SFTConfig

__all__ = [
    "Batching",
    "EvalConfig",
    "GenerateConfig",
    "Loaded",
    "RMConfig",
    "SFTConfig",
    "TrainConfig",
    "derived",
    "explain",
    "load_eval_config",
    "load_generate_config",
    "load_rm_config",
    "load_sft_config",
    "load_train_config",
    "split_arguments",
    "to_dict",
    "to_yaml",
]
