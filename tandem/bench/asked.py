"""The request of a benchmark: its config, models and lengths.

A model may be described by only a config.json. This module does not need torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem import hub
from tandem.bench.lengths import lengths
from tandem.config.dynamic_sampling import SamplerConfig
from tandem.config.load import load_train_config
from tandem.config.rewards import CustomRewardConfig
from tandem.config.root import TrainConfig
from tandem.config.sources import read_sources, split_arguments
from tandem.config.written import at_key, to_dict
from tandem.errors import ConfigError, ModelError
from tandem.memory.seconds import Lengths
from tandem.memory.shapes import published
from tandem.trainer.quiet import quiet

MODEL_KEYS = ("actor_rollout_ref.model.path", "critic.model.path", "reward_model.model.path")
_POSITIONS = 131072  # for a model of which only the name is known; random weights work at any length
_FILES = ("data.train_files", "data.val_files")


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of a benchmark.

    Attributes:
        words: words of a config of `tandem train`.
        dummy: whether models get random weights.
        prompts: lengths of the prompts, see `tandem.bench.lengths`; "": the longest.
        responses: lengths of the responses, in the same format.
        steps: number of measured steps.
        warm_up: number of steps before the measured steps.
        saves: whether a checkpoint is written at the end.
        folder: folder for all files; workers on other machines must have access to it.
    """

    words: tuple[str, ...]
    dummy: bool
    prompts: str
    responses: str
    steps: int
    warm_up: int
    saves: bool
    folder: Path


def load(words: Sequence[str], folder: Path, *, dummy: bool) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the config of `words` with the benchmark's prompts, and the keys that were given.

    Args:
        words: words of a config of `tandem train`.
        folder: folder for prompts and models. Of the models, only config.json and the tokenizer are written
            here.
        dummy: whether the models get random weights.

    Raises:
        ConfigErrors: all errors of the config.
        ModelError: a model's config.json is missing.
    """
    path, overrides = split_arguments(list(words))
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), prompts)
    tree, *_ = read_sources(path, overrides)
    sources = {key: source for key in MODEL_KEYS if dummy and (source := at_key(tree, key)) is not None}
    made = [
        f"{key}={_described(str(source), folder / key.partition('.')[0])}" for key, source in sources.items()
    ]
    loaded = load_train_config(
        path, [*overrides, f"data.train_files={prompts}", "data.val_files=null", *made]
    )
    whole = to_dict(loaded.config)
    given = {key: at_key(whole, key) for key in sorted(loaded.given) if key not in _FILES}
    return loaded.config, given | {key: str(source) for key, source in sources.items()}


def _described(source: str, folder: Path) -> Path:
    """Write a folder with the config.json of a model, and its tokenizer if available; return the folder.

    Args:
        source: a config.json, a folder with one, or the name of a known model.
        folder: the folder to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place, known = Path(source).expanduser(), published(source)
    if known is None and hub.is_name(source):
        place = Path(hub.find(source).folder or place)
    file = place / "config.json" if place.is_dir() else place
    if file.is_file():
        shutil.copy(file, folder / "config.json")
    elif known is not None:
        (folder / "config.json").write_text(
            json.dumps(known | {"max_position_embeddings": _POSITIONS}), encoding="utf-8"
        )
    else:
        raise ModelError(
            "this does not describe a model",
            field="model.path",
            got=source,
            expected="a config.json, a folder with one, or a name such as Qwen/Qwen2.5-7B",
        )
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")  # the config requires this file
    for pattern in ("tokenizer*", "vocab.*", "merges.txt", "*.jinja") if place.is_dir() else ():
        for each in place.glob(pattern):
            shutil.copy(each, folder / each.name)
    return folder


def draw(config: TrainConfig, prompts: str, responses: str) -> Lengths:
    """Return the prompt and response lengths of a training step; see `tandem.bench.lengths`."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    size, n = data.prompts_at_a_time, max(rollout.group_sizes.values())
    most = min(data.max_response_length, rollout.longest(data) - 1)
    asked = lengths("--prompt-lengths", prompts or str(data.max_prompt_length), size, data.max_prompt_length)
    written = lengths("--lengths", responses or str(most), size * n, most)
    rng = np.random.default_rng(0)
    return Lengths(rng.permutation(asked), rng.permutation(written).reshape(size, n))


def as_benchmark(config: TrainConfig, asked: Asked) -> TrainConfig:
    """Return the config of the benchmark.

    The config is a copy of the user's config with a given number of steps, unshuffled prompts, and the worker
    and reward of the benchmark. The run writes only to its folder.

    Args:
        config: the config of the user.
        asked: the request.

    Raises:
        ConfigError: the config sets a worker class for the policy.
    """
    trainer = config.trainer
    apart = trainer.placed("actor") != trainer.placed("rollout")
    if clash := sorted({"actor", "rollout", "actor_rollout"} & set(trainer.worker_classes)):
        raise ConfigError(
            "a benchmark uses its own worker for the policy",
            field=f"trainer.worker_classes.{clash[0]}",
            remedy="leave this key out; `tandem train` also measures these phases, with your worker",
        )
    roles = ("actor", "rollout") if apart else ("actor_rollout",)
    workers = dict.fromkeys(roles, "tandem.bench.parts:BenchWorker")
    changes: dict[str, Any] = {
        "data.shuffle": False,
        "data.prompt_key": "prompt",
        "data.reward_fn_key": "data_source",
        "data.train_max_samples": -1,
        "data.sampler": SamplerConfig(),
        "trainer.critic_warmup": 0,
        "trainer.worker_classes": trainer.worker_classes | workers,
        "trainer.save_freq": -1 if asked.saves else 0,
        "trainer.worst_batch_first": False,
        "trainer.on_step": None,
    }
    if not config.reward_model.enable:
        reward = CustomRewardConfig(path="tandem.bench.reward", name="drawn")
        changes["custom_reward_function"] = reward
    return quiet(config, asked.folder / "run", asked.steps + asked.warm_up, changes)
