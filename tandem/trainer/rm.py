"""The training of a reward model on preferences, by the Bradley-Terry loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.config.supervised import RMConfig
from tandem.data.preferences import PreferenceDataset
from tandem.models.loading import lacks_score_head, load_config
from tandem.trainer.run import run
from tandem.trainer.supervised import SupervisedTrainer, Task, build_supervised
from tandem.workers.losses import PreferenceLoss


def build_rm(config: RMConfig, *, say: Callable[[str], None]) -> SupervisedTrainer:
    """See `build_supervised`; a language model gets a new head, and the user hears of it."""
    data, model = config.data, config.model
    if lacks_score_head(load_config(model.path, trust_remote_code=model.trust_remote_code)):
        say(f"{model.path} is a language model: its score head is new, drawn by trainer.seed.")
    dataset = partial(
        PreferenceDataset,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        prompt_key=data.prompt_key,
        margin_key=data.margin_key,
        max_length=data.max_length,
        truncation=data.truncation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    loss = PreferenceLoss(config.center_rewards_coefficient)
    task = Task(name="rm", role="reward_model", kind="score", loss=loss, dataset=dataset)
    return build_supervised(config, task, say=say)


def run_rm(config: RMConfig, *, say: Callable[[str], None]) -> bool:
    """Trains to the end; see `run`."""
    return run(config, partial(build_rm, say=say), say)
