"""Train from Python: RL, supervised fine-tuning and reward models.

`train` runs reinforcement learning to the end. `Trainer` runs reinforcement learning step by step. `sft`
fine-tunes on examples, and `reward_model` trains a reward model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from tandem.api.arguments import (
    ALGORITHMS,
    INPUTS,
    Config,
    Rewards,
    new_folder,
    reference,
    reward_keys,
    rows_keys,
    split_config,
    words,
)
from tandem.api.notebook import LiveCurve
from tandem.api.rows import Rows
from tandem.api.runs import Run
from tandem.config.load import Loaded, load_rm_config, load_sft_config, load_train_config
from tandem.config.root import TrainConfig
from tandem.data.chat import ChatTemplate
from tandem.data.files import count_rows
from tandem.data.tokens import encoded
from tandem.errors import ConfigError
from tandem.models.ends import stop_token_ids
from tandem.models.vocabulary import tokenizer_of
from tandem.observability.terminal import say
from tandem.protocol import DataProto, Ragged
from tandem.trainer.assembly import build_ppo
from tandem.trainer.here import lacking, refuse
from tandem.trainer.loop import Step
from tandem.trainer.run import run_ppo, run_rm, run_sft
from tandem.trainer.sampling_params import sampling

Algorithm = str | Callable[..., Any]
OnStep = Callable[[int, Mapping[str, float]], Any]
"""A function that is called with the number and the metrics of each step."""


def train(
    model: str | Path,
    *,
    train: Rows,
    val: Rows = None,
    rewards: Rewards = None,
    algorithm: Algorithm = "grpo",
    steps: int | None = None,
    out: str | Path | None = None,
    config: Config = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train a model with reinforcement learning and return the finished run.

    This is the same as `tandem train` with these settings. Each argument corresponds to config keys, and
    `config` has all other keys. If you interrupt a run (Ctrl-C, or the stop button of a notebook), the
    current step is finished and saved. The same call continues the run.

    Args:
        model: a Hugging Face folder of a causal language model.
        train: rows with a `prompt` and the columns that the reward functions read: a list of dicts, a table
            of pandas, polars, pyarrow or datasets, or files.
        val: rows for validation.
        rewards: reward functions, see `tandem.rewards.signatures`: one, a list, or a dict that maps functions
            to weights. A string `file.py:function` can replace a function. With None, the `data_source` of
            each row selects a built-in reward function.
        algorithm: name of an advantage estimator (`ppo` means `gae`), or a function.
        steps: number of training steps; None: train for `trainer.total_epochs`.
        out: the run folder; None: a new folder below `runs`.
        config: a dict from config key (dotted or nested) to value, or a YAML file.
        on_step: called in this process with the number and the metrics of each completed step.

    Raises:
        TandemError: an argument is invalid. If possible, the error is raised before the model is loaded.
    """
    loaded = _loaded(model, train, val, rewards, algorithm, steps, out, config)
    heard = [] if on_step is None else [lambda step: on_step(step.number, step.metrics)]
    run_ppo(loaded.config, say=say, listeners=[LiveCurve(), *heard])
    return Run(loaded.config.trainer.default_local_dir)


class Trainer:
    """A reinforcement learning run that you run one step at a time: `for step in trainer: …`.

    Each step has a number and metrics. If you break out of the loop, the run pauses, and another loop
    continues the run. When the `with` block ends, or on `close`, the last step is saved if needed, and the
    workers are stopped.

    Args:
        model: see `train`.
        train: see `train`.
        val: see `train`.
        rewards: see `train`.
        algorithm: see `train`.
        steps: see `train`.
        out: see `train`.
        config: see `train`.

    Attributes:
        config: the resolved config.
        run: a reader of the run folder.

    Raises:
        TandemError: see `train`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        train: Rows,
        val: Rows = None,
        rewards: Rewards = None,
        algorithm: Algorithm = "grpo",
        steps: int | None = None,
        out: str | Path | None = None,
        config: Config = None,
    ) -> None:
        self.config = _loaded(model, train, val, rewards, algorithm, steps, out, config).config
        self._loop = build_ppo(self.config, say=say, listeners=[LiveCurve()])
        self._steps = self._loop.steps()
        self._closed = False
        try:
            with self._loop.session.listening():
                next(self._steps)
            self.run = Run(self.config.trainer.default_local_dir)
        except BaseException:
            self._loop.shutdown()
            raise

    def __iter__(self) -> Iterator[Step]:
        """Yield the remaining steps; an interrupt ends the loop after the current step, which is saved."""
        self._require_open()
        while True:
            with self._loop.session.listening():
                step = next(self._steps, None)
            if step is None:
                return
            yield step
            if step.interrupted:
                return

    def train(self) -> Run:
        """Run all remaining steps, close the trainer, and return the run."""
        with self:
            for _ in self:
                pass
        return self.run

    def generate(self, prompts: Sequence[Any], *, n: int = 1, greedy: bool = False) -> list[list[str]]:
        """Generate responses to prompts with the current weights and the sampling settings of training.

        Args:
            prompts: texts, which are used as already formatted, or lists of messages.
            n: number of responses per prompt.
            greedy: whether to use greedy sampling, as in validation.

        Returns:
            n texts for each prompt.
        """
        self._require_open()
        model, data = self.config.actor_rollout_ref.model, self.config.data
        tokenizer = tokenizer_of(model, "actor_rollout_ref.model")
        template = ChatTemplate(tokenizer, data.apply_chat_template_kwargs)
        ids = [np.concatenate(parts) for parts in encoded(tokenizer, list(map(template.prompt, prompts)))]
        rows = Ragged.from_lengths(torch.from_numpy(np.concatenate(ids)).to(torch.int64), list(map(len, ids)))
        asked = DataProto({"prompts": rows}, {"uid": [f"asked-{row}" for row in range(len(ids))]})
        params = sampling(self.config, stop_token_ids(model.path, tokenizer), validation=greedy)
        samples = self._loop.sample(asked, n, params)
        texts = [str(tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in samples]
        return [texts[start : start + n] for start in range(0, len(texts), n)]

    def evaluate(self) -> dict[str, float]:
        """Validate with the current weights and return the metrics.

        Raises:
            ConfigError: there are no rows for validation.
        """
        self._require_open()
        if not self._loop.can_validate:
            raise ConfigError("there are no rows for validation", field="val", remedy="set val=…")
        return self._loop.validate(self._loop.done.number)

    def save_model(self, folder: str | Path) -> Path:
        """Write the current weights as a folder that transformers can load, and also save a checkpoint.

        Args:
            folder: the folder to write; it must not exist, or must be empty.

        Raises:
            CheckpointError: no step is finished yet, or the run keeps no checkpoints.
        """
        if not self._closed:
            self._loop.save_unsaved()
        return self.run.export(folder)

    def close(self) -> None:
        """Save a checkpoint if the last step is not saved yet, and stop the workers."""
        if self._closed:
            return
        self._closed = True
        try:
            if (
                getgeneratorstate(self._steps) == GEN_SUSPENDED
            ):  # otherwise it has ended, or failed within a step
                self._loop.save_unsaved()
            self._steps.close()
        finally:
            self._loop.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError(
                "the trainer is closed",
                field="Trainer",
                remedy="create a new Trainer with the same out; it continues from the last checkpoint",
            )


def sft(
    model: str | Path,
    *,
    train: Rows,
    val: Rows = None,
    steps: int | None = None,
    out: str | Path | None = None,
    config: Config = None,
) -> Run:
    """Fine-tune a model on example responses, like `tandem sft`, and return the finished run.

    Args:
        model: see `train`.
        train: rows with `messages`, or with a `prompt` and a `response`; otherwise see `train`.
        val: see `train`.
        steps: see `train`.
        out: see `train`.
        config: see `train`.

    Raises:
        TandemError: an argument is invalid.
    """
    loaded = _resolved(load_sft_config, "sft", "model.path", model, train, val, steps, out, config)
    run_sft(loaded.config, say=say)
    return Run(loaded.config.trainer.default_local_dir)


def reward_model(
    model: str | Path,
    *,
    train: Rows,
    val: Rows = None,
    steps: int | None = None,
    out: str | Path | None = None,
    config: Config = None,
) -> Run:
    """Train a reward model on preferences, like `tandem rm`, and return the finished run.

    Args:
        model: see `train`.
        train: rows with `chosen` and `rejected`; otherwise see `train`.
        val: see `train`.
        steps: see `train`.
        out: see `train`.
        config: see `train`.

    Raises:
        TandemError: an argument is invalid.
    """
    loaded = _resolved(load_rm_config, "rm", "model.path", model, train, val, steps, out, config)
    run_rm(loaded.config, say=say)
    return Run(loaded.config.trainer.default_local_dir)


def _loaded(
    model: str | Path,
    train: Rows,
    val: Rows,
    rewards: Rewards,
    algorithm: Algorithm,
    steps: int | None,
    out: str | Path | None,
    config: Config,
) -> Loaded[TrainConfig]:
    """Return the resolved config of a reinforcement learning run."""
    estimator = ALGORITHMS.get(algorithm, algorithm) if isinstance(algorithm, str) else algorithm
    named = algorithm if isinstance(algorithm, str) else algorithm.__name__

    def own(inputs: Path) -> dict[str, Any]:
        place = estimator if isinstance(estimator, str) else reference(estimator, inputs)
        return {**reward_keys(rewards, inputs), "algorithm.adv_estimator": place}

    load = partial(load_train_config, count_rows=count_rows)
    key, name = "actor_rollout_ref.model.path", named.rpartition(":")[2]
    return _resolved(load, name, key, model, train, val, steps, out, config, own)


def _resolved(
    load: Callable[..., Loaded[Any]],
    name: str,
    model_key: str,
    model: str | Path,
    train: Rows,
    val: Rows,
    steps: int | None,
    out: str | Path | None,
    config: Config,
    own: Callable[[Path], dict[str, Any]] = lambda inputs: {},
) -> Loaded[Any]:
    """Load a config, print its notices, and check that all its files and devices exist here.

    Args:
        load: the function that loads the config of a command.
        name: name of a new run folder.
        model_key: the config key of the model.
        model: see `train`.
        train: see `train`.
        val: see `train`.
        steps: see `train`.
        out: see `train`.
        config: see `train`.
        own: returns the additional keys of the command, given the folder for rows and functions.
    """
    file, keys = split_config(config)
    folder = Path(out or keys.get("trainer.default_local_dir") or new_folder(name))
    inputs = folder / INPUTS
    given = {
        model_key: str(model),
        **rows_keys(train, val, inputs),
        **own(inputs),
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": str(folder),
        **keys,
    }
    loaded = load(file, words(given, inputs))
    for notice in loaded.messages:
        say(f"note: {notice}")
    refuse(lacking(loaded.config))
    return loaded
