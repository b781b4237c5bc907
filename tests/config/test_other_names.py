"""Suggestions for keys that another program names differently."""

import pytest

from tandem.config.other_names import OTHER_NAMES
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, unknown_key
from tandem.config.supervised import RMConfig, SFTConfig
from tests.support.words import full, rows

MEANT = """
optim.learning_rate | A.optim.lr | optim.lr
learning_rate | A.optim.lr
learning-rate | A.optim.lr
A.optim.learning_rate | A.optim.lr
critic.optim.learning_rate | critic.optim.lr
critic_learning_rate | critic.optim.lr
warmup_ratio | A.optim.lr_warmup_steps_ratio
max_grad_norm | A.optim.clip_grad
num_generations | R.n
n_samples_per_prompt | R.n
orchestrator.rollouts_per_example | R.n
max_completion_length | data.max_response_length
generate_max_len | data.max_response_length
num_train_epochs | trainer.total_epochs
max_steps | trainer.total_training_steps
output_dir | trainer.default_local_dir
model_name_or_path | M.path | model.path
pretrain | M.path
beta | A.kl_loss_coef
epsilon_high | A.clip_ratio_high
per_device_train_batch_size | A.ppo_micro_batch_size_per_gpu | micro_batch_size_per_gpu
max_seq_length | - | data.max_length
"""


@pytest.mark.parametrize(("given", "meant", "supervised"), rows(MEANT))
def test_the_key_that_is_meant_is_named(given, meant, supervised):
    for root, key in ((TrainConfig, meant), (SFTConfig, supervised), (RMConfig, supervised)):
        if key not in ("", "-"):
            assert unknown_key(full(given), keys(root)).remedy == f"did you mean {full(key)}?"


def test_every_meaning_is_a_key_and_no_name_is():
    known = [name for root in (TrainConfig, SFTConfig, RMConfig) for name in keys(root)]
    for name, ends in OTHER_NAMES.items():
        assert all(any(key == end or key.endswith(f".{end}") for key in known) for end in ends), name
