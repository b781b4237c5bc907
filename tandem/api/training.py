"""Training from Python: `train` from start to end, `Trainer` step by step, and `sft` and `reward_model`."""

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
"""Called with each step's number and metrics."""


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
    """Trains a model by reinforcement, from start to end, and returns its run.

    The same as `tandem train` with these settings; each argument is a key, and `config` takes any other. A
    run that is interrupted (Ctrl-C, or a notebook's stop) finishes its step and is saved; the same call goes
    on.

    Args:
        model: a Hugging Face folder of a causal language model.
        train: rows with a `prompt` and what the rewards read: a list of dicts, a table of pandas, polars,
            pyarrow or datasets, or files.
        val: rows to validate on.
        rewards: reward functions, see `tandem.rewards.signatures`: one, a list, or a dict of function to
            weight; `file.py:function` stands for one too. None: by the rows' `data_source`.
        algorithm: an advantage estimator by name (`ppo` is `gae`), or a function.
        steps: training steps; None: as `trainer.total_epochs` gives.
        out: the run folder; None: a new one below `runs`.
        config: keys with their values, dotted or nested, or a YAML file.
        on_step: called in this process with the number and the metrics of each step that is done.

    Raises:
        TandemError: anything that is wrong with these; before the model is loaded, where it can be known.
    """
    loaded = _loaded(model, train, val, rewards, algorithm, steps, out, config)
    heard = [] if on_step is None else [lambda step: on_step(step.number, step.metrics)]
    run_ppo(loaded.config, say=say, listeners=[LiveCurve(), *heard])
    return Run(loaded.config.trainer.default_local_dir)


class Trainer:
    """A live run of reinforcement learning, one step at a time: `for step in trainer: …`.

    A step has its number and its metrics. Breaking out of the loop pauses; another loop goes on. As a
    context, or with `close`, it ends its workers, and saves the last step unless that was saved.

    Args:
        model, train, val, rewards, algorithm, steps, out, config: see `train`.

    Attributes:
        config: the resolved config.
        run: what the run has written so far.

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
        """The steps that are left. An interrupt ends the loop after its step, which is saved."""
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
        """Takes all steps that are left, closes, and returns the run."""
        with self:
            for _ in self:
                pass
        return self.run

    def generate(self, prompts: Sequence[Any], *, n: int = 1, greedy: bool = False) -> list[list[str]]:
        """Answers prompts with the weights as they are now, sampled as in training.

        Args:
            prompts: texts, taken as already formatted, or lists of messages.
            n: responses to each.
            greedy: the most likely token each time, as in validation.

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
        """Validates with the weights as they are now.

        Raises:
            ConfigError: there are no rows to validate on.
        """
        self._require_open()
        if not self._loop.can_validate:
            raise ConfigError("there are no rows to validate on", field="val", remedy="give val=…")
        return self._loop.validate(self._loop.done.number)

    def save_model(self, folder: str | Path) -> Path:
        """Writes the weights as they are now as a folder that transformers loads, and keeps them as a
        checkpoint too.

        Args:
            folder: must not exist or be empty.

        Raises:
            CheckpointError: no step was taken, or the run keeps no checkpoints.
        """
        if not self._closed:
            self._loop.save_unsaved()
        return self.run.export(folder)

    def close(self) -> None:
        """Ends the run: what was learnt since the last checkpoint is saved, and the workers end."""
        if self._closed:
            return
        self._closed = True
        try:
            if getgeneratorstate(self._steps) == GEN_SUSPENDED:  # else it ended, or broke off within a step
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
                remedy="make another one with the same out; it goes on from the last checkpoint",
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
    """Fine-tunes a model on what it is to say, from start to end, and returns its run; as `tandem sft`.

    Args:
        train: rows with `messages`, or a `prompt` and a `response`; see `train`.
        model, val, steps, out, config: see `train`.

    Raises:
        TandemError: anything that is wrong with these.
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
    """Trains a reward model from preferences, from start to end, and returns its run; as `tandem rm`.

    Args:
        train: rows with `chosen` and `rejected`; see `train`.
        model, val, steps, out, config: see `train`.

    Raises:
        TandemError: anything that is wrong with these.
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
    """The config of a run of reinforcement."""
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
    """The config, once its notices are printed and nothing that it needs is missing here.

    Args:
        load: a command's.
        name: of a new folder.
        model_key: the key of the model.
        model, train, val, steps, out, config: see `train`.
        own: makes the command's own keys, with the folder of rows and functions.
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
