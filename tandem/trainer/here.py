"""Check whether a run with a valid config can start on this machine, with its data and its model.

You can check a config for another machine on a laptop. A run, however, cannot start if, for example, a
device, a package or a file is missing here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from typing import Any

from pyarrow import parquet

from tandem.config.actor import reference_name
from tandem.config.changed_models import limit_name, position_limit, rope_type, stored_config
from tandem.config.cluster import kind_of
from tandem.config.facts import POLICY, models
from tandem.config.model import PLAIN_DECODERS
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.config.trainer import RunConfig
from tandem.data.files import count_rows
from tandem.errors import ConfigError, TandemError

RunsConfig = TrainConfig | SupervisedConfig
"""The config of a training command: RL, SFT or reward model."""


def lacking(config: RunsConfig) -> list[TandemError]:
    """Return an error for each thing that this machine lacks and each visible fault of data or model.

    The user's own reward function is loaded. PyTorch is imported only if a check needs it.
    """
    return [*missing_here(config), *_errors(config, (_rows, _architectures, _vocabulary), (_positions,))]


def missing_here(config: RunsConfig) -> list[TandemError]:
    """Return an error for each device, package or file that this machine lacks."""
    return _errors(config, (_device, _ray), (_rollout_package, _reward))


def unfit(config: RunsConfig) -> list[TandemError]:
    """Return an error for each fault of the data and the model.

    The data is read in the same way as in a run, so this can take as long as the start of a run.
    """
    examine: Callable[[RunsConfig], None] = import_module("tandem.trainer.beforehand").examine
    return _errors(config, (_rows, _architectures, _vocabulary, examine), (_positions,))


def crowded(trainer: RunConfig) -> str | None:
    """Return a sentence if the run would start more processes on this machine's CPU than it has cores."""
    processes, cores = sum(max(counts) for counts in trainer.pools.values()), os.cpu_count() or 1
    if trainer.cluster.address is not None or processes <= cores:
        return None
    if trainer.device != "cpu" and import_module("torch").cuda.is_available():
        return None
    return (
        f"this run has {processes} processes on a CPU with {cores} cores, so they slow each other down. "
        "Without a GPU, each device is a process. Lower trainer.n_gpus_per_node, or the numbers in "
        f"trainer.resource_pools, to at most {cores} processes."
    )


def _errors(
    config: RunsConfig,
    checks: tuple[Callable[[Any], None], ...],
    policy_checks: tuple[Callable[[TrainConfig], None], ...],
) -> list[TandemError]:
    """Return the errors that the checks raise.

    Args:
        config: The config to check.
        checks: Checks for every run.
        policy_checks: Checks for runs of reinforcement learning only.
    """
    found: list[TandemError] = []
    for check in (*checks, *(policy_checks if isinstance(config, TrainConfig) else ())):
        try:
            check(config)
        except TandemError as error:
            found.append(error)
    return found


def refuse(missing: list[TandemError]) -> None:
    """Raise an error if the list has errors.

    Raises:
        TandemError: The list is not empty. Several messages are joined into one message, each once.
    """
    different = list({str(error): error for error in missing}.values())
    if len(different) == 1:
        raise different[0]
    if different:
        raise TandemError("\n".join([f"{len(different)} things are wrong or missing", *map(str, different)]))


def _device(config: RunsConfig) -> None:
    trainer = config.trainer
    here = trainer.resolved_backend == "local" or trainer.cluster.address is None  # Ray is started here
    if trainer.device == "cuda" and here:
        import_module("tandem.device").choose_device("cuda")


def _ray(config: RunsConfig) -> None:
    if config.trainer.resolved_backend != "ray":
        return
    if find_spec("ray") is None:
        import_module("tandem.trainer.launch").ray_backend(asked=config.trainer.backend)
    python = (config.trainer.cluster.ray_init.get("runtime_env") or {}).get("py_executable")
    if python and which(str(python).split()[0]) is None:
        raise ConfigError(
            "Ray could not start a process with this program, which does not exist here",
            field="trainer.cluster.ray_init.runtime_env.py_executable",
            got=python,
            expected="a command that starts Python",
            remedy="leave the key out, or set it to null to use the Python of this run",
        )


def _rollout_package(config: TrainConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.server.urls:
        return
    if rollout.name == "vllm" and find_spec("vllm") is None:
        import_module("tandem.engines.rollout.vllm.process").check_installed()
    if rollout.name == "sglang":
        process = import_module("tandem.engines.rollout.sglang.process")
        process.check_installed(rollout.server.python or sys.executable)


def _reward(config: TrainConfig) -> None:
    if config.custom_reward_function.given:
        import_module("tandem.rewards").own_reward(config.custom_reward_function, config.reward.timeout)
    if config.reward.combine is not None:
        combination = import_module("tandem.rewards.combination")
        combination.load_combine(config.reward.combine, config.reward.timeout)


def _rows(config: RunsConfig) -> None:
    own = isinstance(config, TrainConfig) and config.data.custom_cls.path is not None
    if own or not all(file.endswith(".parquet") for file in config.data.train_files):
        return
    most = config.data.train_max_samples if isinstance(config, TrainConfig) else -1
    rows, size = count_rows(config.data.train_files, most), config.data.train_batch_size
    if not rows or rows >= size:  # the code that reads the file reports an empty file
        return
    data = config.data  # the code that reads the file reports a missing column
    columns = {RMConfig: ("chosen_key",), SFTConfig: ("messages_key", "prompt_key", "text_key")}
    keys = columns.get(type(config), ("prompt_key",))
    wanted = {getattr(data, key) for key in keys}
    if all(wanted & set(parquet.read_schema(file).names) for file in data.train_files):
        import_module("tandem.data.loader").batches_of(rows, size)


def _architectures(config: RunsConfig) -> None:
    """Test each model on packed sequences, unless its architecture is covered by Tandem's tests.

    For a tested architecture, transformers is not imported, because the import takes seconds.
    """
    if isinstance(config, TrainConfig):
        rollout = config.actor_rollout_ref.rollout
        longest, native = rollout.longest(config.data), rollout.name == "native"
    else:
        longest, native = config.data.max_length, False
    tried: set[tuple[str, bool, bool]] = set()
    for role, engine, path in models(config):
        stored, remote = stored_config(path), engine.model.trust_remote_code
        scorer = kind_of(role) == "reward_model" or isinstance(config, RMConfig)
        known = _tested(stored) and not (remote and "auto_map" in stored)
        if not known and (path, scorer, remote) not in tried:
            import_module("tandem.trainer.trial").require_sound_model(
                path,
                longest=longest,
                native=native and role == "actor",
                scorer=scorer,
                trust_remote_code=remote,
            )
            tried.add((path, scorer, remote))


def _tested(stored: dict[str, Any]) -> bool:
    """Return whether a config.json has an architecture that Tandem's tests train.

    Such a model attends to all tokens, and its rotary angles depend only on the position.
    """
    kind = stored.get("model_type")
    windowed = stored.get("sliding_window") and stored.get("use_sliding_window", kind == "mistral")
    rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
    stretched = rope_type(rope) in ("dynamic", "longrope")
    return kind in PLAIN_DECODERS and not (windowed or stretched)


def _vocabulary(config: RunsConfig) -> None:
    """Check that the embeddings of all models that read the tokenizer's ids are large enough.

    Code that comes with a model folder is not run here. If a tokenizer needs such code, it is checked when
    the model is loaded.
    """
    policy, *others = models(config)
    if policy.engine.model.trust_remote_code:
        return
    vocabulary = import_module("tandem.models.vocabulary")
    tokenizer = vocabulary.tokenizer_of(policy.engine.model, policy.engine.model_at)
    for role, engine, path in others:
        if kind_of(role) != "reward_model" and path != policy.path and not engine.model.trust_remote_code:
            at = "critic.model" if role == "critic" else f"{POLICY}.ref.models.{reference_name(role)}"
            vocabulary.check_reader(path, tokenizer, field=f"{at}.path")


def _positions(config: TrainConfig) -> None:
    stored = stored_config(config.actor_rollout_ref.model.path)
    most, longest = position_limit(stored), config.data.max_response_length
    if most is not None and longest >= most:
        raise ConfigError(
            "the response alone is as long as the model's positions, which must also hold the prompt",
            field="data.max_response_length",
            got=longest,
            expected=f"below {limit_name(stored)} = {most}",
            remedy="lower data.max_response_length",
        )
