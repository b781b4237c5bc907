"""What a benchmark is asked for: a config, models of which there may be nothing but a config.json, lengths.
Nothing here needs torch."""

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
_POSITIONS = 131072  # of a model of which the name alone is known; weights are random at any length
_FILES = ("data.train_files", "data.val_files")


@dataclass(frozen=True, slots=True)
class Asked:
    """A benchmark.

    Attributes:
        words: of a config of `tandem train`.
        dummy: whether models get random weights.
        prompts, responses: their lengths, see `lengths`; "" is the greatest.
        steps, warm_up: that are measured, and before them.
        saves: whether a checkpoint is written at the end.
        folder: for everything it makes; workers on other machines must see it.
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
    """The config of `words` over prompts that a benchmark will make, and the keys that were given.

    Args:
        folder: for prompts and models; of these it gets no more than their config.json.
        dummy: whether the models are to be made.

    Raises:
        ConfigErrors: everything that is wrong with the config.
        ModelError: nothing to make a model of.
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
    """A folder with the config.json, and the tokenizer if there is one, of a config.json, a folder with one,
    or a model that is known by name."""
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
            "nothing to make a model of",
            field="model.path",
            got=source,
            expected="a config.json, a folder with one, or a name such as Qwen/Qwen2.5-7B",
        )
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")  # the config asks for one
    for pattern in ("tokenizer*", "vocab.*", "merges.txt", "*.jinja") if place.is_dir() else ():
        for each in place.glob(pattern):
            shutil.copy(each, folder / each.name)
    return folder


def draw(config: TrainConfig, prompts: str, responses: str) -> Lengths:
    """The lengths that a step of a config has; see `lengths`."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    size, n = data.prompts_at_a_time, max(rollout.group_sizes.values())
    most = min(data.max_response_length, rollout.longest(data) - 1)
    asked = lengths("--prompt-lengths", prompts or str(data.max_prompt_length), size, data.max_prompt_length)
    written = lengths("--lengths", responses or str(most), size * n, most)
    rng = np.random.default_rng(0)
    return Lengths(rng.permutation(asked), rng.permutation(written).reshape(size, n))


def as_benchmark(config: TrainConfig, asked: Asked) -> TrainConfig:
    """The same run for so many steps over the prompts as they lie, with the worker and the reward of a
    benchmark, and no trace but in its folder.

    Raises:
        ConfigError: the policy has a worker of the user's own.
    """
    trainer = config.trainer
    apart = trainer.placed("actor") != trainer.placed("rollout")
    if clash := sorted({"actor", "rollout", "actor_rollout"} & set(trainer.worker_classes)):
        raise ConfigError(
            "a benchmark has a worker of its own for the policy",
            field=f"trainer.worker_classes.{clash[0]}",
            remedy="leave it out; `tandem train` measures the same phases with it",
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
