"""The rules of `tandem generate` and `tandem eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.config.check import Findings, found_by, min_tokens, unsplit
from tandem.config.files import files, model, reward_file
from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.section import Section
from tandem.config.servers import servers
from tandem.config.unused import (
    EVAL_ERRORS,
    OFFLINE_ERRORS,
    OFFLINE_NOTICES,
    unused_errors,
    unused_notices,
)
from tandem.errors import ConfigError


def check_generate(config: GenerateConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem generate`; as `check_train`."""
    found = found_by(GENERATE_RULES, config, changed, bad)
    found.errors.extend(unused_errors(OFFLINE_ERRORS, config, changed, bad))
    found.notices.extend(unused_notices(OFFLINE_NOTICES, config, changed, bad))
    return found


def check_eval(config: EvalConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem eval`; as `check_train`."""
    found = found_by(EVAL_RULES, config, changed, bad)
    found.errors.extend(unused_errors(EVAL_ERRORS, config, changed, bad))
    found.notices.extend(unused_notices(OFFLINE_NOTICES, config, changed, bad))
    return found


def _output(*suffixes: str) -> Rule[Any]:
    """The output's name says its format."""

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        field, path = "data.output_path", str(value_at(config, "data.output_path"))
        if not path.endswith(suffixes):
            expected = f"a name that ends in {' or '.join(suffixes)}"
            yield ConfigError("unknown format", field=field, got=path, expected=expected)

    return Rule(("data.output_path",), check)


def _one_greedy(config: Any, changed: frozenset[str]) -> Iterator[str]:
    if config.rollout.temperature == 0 and config.rollout.n > 1:
        yield f"rollout.n={config.rollout.n}: greedy responses to one prompt are all the same; one would do."


_OFFLINE_RULES: list[Rule[Any]] = [
    files("data.path"),
    model("model.path", "config.json"),
    model("model.tokenizer_path", "tokenizer_config.json"),
    Rule(("rollout.n", "rollout.temperature"), _one_greedy),
    min_tokens("rollout.min_tokens"),
    unsplit("rollout.tensor_model_parallel_size", "each layer of the rollout engine"),
    servers("rollout", training=False),
]
GENERATE_RULES: list[Rule[GenerateConfig]] = [*_OFFLINE_RULES, _output(".parquet", ".jsonl")]
EVAL_RULES: list[Rule[EvalConfig]] = [
    *_OFFLINE_RULES,
    _output(".json"),
    Rule(("custom_reward_function.path",), reward_file),
]
