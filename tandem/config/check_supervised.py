"""The rules of `tandem sft` and `tandem rm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.config import placement
from tandem.config.activations import activation_rules
from tandem.config.check import Findings, found_by, restarts, token_budget, validation_data
from tandem.config.engine import engine_rule
from tandem.config.files import files, keep_best, model, resume
from tandem.config.kernels import fused_head, liger
from tandem.config.lora import lora_rules
from tandem.config.rule import Rule
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.config.unused import SUPERVISED_ERRORS, SUPERVISED_NOTICES, unused_errors, unused_notices


def check_sft(config: SFTConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem sft`; as `check_train`."""
    return _check(SFT_RULES, config, changed, bad)


def check_rm(config: RMConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem rm`; as `check_train`."""
    return _check(RM_RULES, config, changed, bad)


def _check(
    rules: Iterable[Rule[Any]], config: SupervisedConfig, changed: frozenset[str], bad: frozenset[str]
) -> Findings:
    found = found_by(rules, config, changed, bad)
    found.errors.extend(unused_errors(SUPERVISED_ERRORS, config, changed, bad))
    found.notices.extend(unused_notices(SUPERVISED_NOTICES, config, changed, bad))
    return found


_SPLITS = (
    "ulysses_sequence_parallel_size",
    "fsdp_config.fsdp_size",
    "fsdp_config.tensor_parallel_size",
    "fsdp_config.pipeline_parallel_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)


def _rules(*lengths: str) -> list[Rule[Any]]:
    """
    Args:
        lengths: the keys whose sum is the greatest length of a row.
    """
    return [
        files("data.train_files"),
        files("data.val_files"),
        model("model.path", "config.json"),
        model("model.tokenizer_path", "tokenizer_config.json"),
        *activation_rules("model"),
        *lora_rules("model"),
        fused_head("model"),
        liger("model"),
        engine_rule("fsdp_config", "model"),
        token_budget("use_dynamic_bsz", "max_token_len_per_gpu", lengths),
        Rule(("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.backend"), placement.backend),
        Rule(("trainer.cluster.address",), placement.address),
        Rule(_SPLITS, placement.supervised_split),
        Rule(("data.val_files", "trainer.test_freq"), validation_data),
        Rule(("trainer.keep_best", "trainer.test_freq"), keep_best),
        Rule(("trainer.max_restarts", "trainer.save_freq"), restarts),
        Rule(("trainer.resume_mode", "trainer.resume_from_path"), resume),
    ]


SFT_RULES = _rules("data.max_length")
RM_RULES = _rules("data.max_length", "data.max_length")  # a pair is never parted
