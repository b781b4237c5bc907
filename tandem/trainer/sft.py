"""Supervised fine-tuning: next-token cross-entropy on what the assistant said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.config.supervised import SFTConfig
from tandem.data.sft import SFTDataset
from tandem.trainer.run import run
from tandem.trainer.supervised import SupervisedTrainer, Task, build_supervised
from tandem.workers.losses import NextTokenLoss


def build_sft(config: SFTConfig, *, say: Callable[[str], None]) -> SupervisedTrainer:
    """See `build_supervised`."""
    data = config.data
    dataset = partial(
        SFTDataset,
        messages_key=data.messages_key,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        max_length=data.max_length,
        truncation=data.truncation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    task = Task(name="sft", role="actor", kind="policy", loss=NextTokenLoss(), dataset=dataset)
    return build_supervised(config, task, say=say)


def run_sft(config: SFTConfig, *, say: Callable[[str], None]) -> bool:
    """Trains to the end; see `run`."""
    return run(config, partial(build_sft, say=say), say)
