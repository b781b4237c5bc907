"""Programming problems, which cannot be scored here: a model's program must run apart from the trainer."""

from __future__ import annotations

from tandem.rewards.base import refuse_data_sources

refuse_data_sources(
    "codecontests",
    "apps",
    "codeforces",
    "taco",
    missing="a sandbox that runs a model's programs on the tests of the data; none is built in",
    remedy="name your own function with custom_reward_function.path, which may ask a sandbox of yours, or "
    "leave these rows out of data.train_files and data.val_files",
)
