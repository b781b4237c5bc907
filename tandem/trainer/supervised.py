"""Supervised training, with the same loop, pools, engine, run folder and checkpoints as RL.

A `Task` defines the model, the data and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.config.supervised import RMConfig, SFTConfig, SupervisedDataConfig
from tandem.data.loader import Dataset
from tandem.data.preferences import PreferenceDataset
from tandem.data.sft import SFTDataset
from tandem.engines.train.base import LossFn
from tandem.engines.train.module import Kind
from tandem.observability.metrics import Metrics
from tandem.runtime import Backend, BatchFuture, WorkerGroup
from tandem.trainer.loop import Loop, Rhythm
from tandem.trainer.perf import take_observed
from tandem.trainer.prompts import Prompts
from tandem.trainer.session import Session
from tandem.workers.losses import NextTokenLoss, PreferenceLoss


@dataclass(frozen=True)
class Task:
    """A task of supervised training: data, model and loss.

    Attributes:
        name: The prefix of the task's metrics.
        role: The role of the model, in the run and in checkpoints.
        kind: The type of model, for example a language model or a reward model.
        loss: The loss to minimize.
        dataset: Makes a dataset from files and a tokenizer. It is a class with its options, so that it can be
            pickled.
    """

    name: str
    role: str
    kind: Kind
    loss: LossFn
    dataset: Callable[..., Dataset]


def sft_task(config: SFTConfig) -> Task:
    """Return the task of supervised fine-tuning: next-token cross-entropy on the assistant's tokens."""
    data = config.data
    names = ("messages_key", "prompt_key", "response_key", "text_key", "tools_key")
    named = {name: getattr(data, name) for name in names}
    dataset = partial(SFTDataset, **named, **_options(data))
    return Task(name="sft", role="actor", kind="policy", loss=NextTokenLoss(), dataset=dataset)


def rm_task(config: RMConfig) -> Task:
    """Return the task of training a reward model on preferences, with the Bradley-Terry loss."""
    data = config.data
    names = ("chosen_key", "rejected_key", "prompt_key", "margin_key")
    named = {name: getattr(data, name) for name in names}
    dataset = partial(PreferenceDataset, **named, **_options(data))
    loss = PreferenceLoss(config.center_rewards_coefficient)
    return Task(name="rm", role="reward_model", kind="score", loss=loss, dataset=dataset)


def _options(data: SupervisedDataConfig) -> dict[str, Any]:
    """Return the dataset options that SFT and reward modeling share."""
    return {
        "max_length": data.max_length,
        "truncation": data.truncation,
        "chat_template_kwargs": data.apply_chat_template_kwargs,
        "workers": data.filter_overlong_prompts_workers,
        "cache_dir": data.cache_dir,
    }


class SupervisedTrainer(Loop[BatchFuture]):
    """The controller of a supervised run.

    Args:
        rhythm: See `Loop`.
        prompts: The training examples; see `Loop`.
        session: See `Loop`.
        backend: See `Loop`.
        name: The prefix of the task's metrics.
        data: The group that reads the examples.
        model: The group that learns.
        val_batches: The number of batches of held-out examples.
    """

    def __init__(
        self,
        rhythm: Rhythm,
        prompts: Prompts,
        session: Session,
        backend: Backend,
        *,
        name: str,
        data: WorkerGroup,
        model: WorkerGroup,
        val_batches: int,
    ) -> None:
        super().__init__(rhythm, prompts, session, backend)
        self.name = name
        self.data = data
        self.model = model
        self.val_batches = val_batches

    def generate(self, step: int, batch: BatchFuture) -> BatchFuture:
        """Return the examples unchanged; nothing is generated."""
        return batch

    def learn(self, step: int, batch: BatchFuture) -> dict[str, float]:
        """Take one optimizer step on `train_batch_size` rows and return its metrics."""
        learnt: Metrics = self.model.update(batch)
        metrics = {f"{self.name}/{name}": value for name, value in learnt.to_floats().items()}
        metrics["training/epoch"] = self.prompts.epoch
        metrics["training/tokens"] = float(batch.index.lengths["tokens"].sum())
        return metrics | take_observed([self.model]).to_floats()

    @property
    def can_validate(self) -> bool:
        return self.val_batches > 0

    def validate(self, step: int) -> dict[str, float]:
        """Return the training metrics, computed on the held-out examples, as `val/…`."""
        parts = [self.model.validate(self.data.val_batch(number)) for number in range(self.val_batches)]
        return {f"val/{name}": value for name, value in Metrics.merged(parts).to_floats().items()}

    @property
    def groups(self) -> Sequence[WorkerGroup]:
        return [self.data, self.model]

    def rates(self, seconds: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        return {**seconds, "perf/step_tokens_per_s": metrics["training/tokens"] / seconds["timing/step"]}

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.prompts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["loader"])
