"""verl's side of advantages.py and of the test that compares numbers.

Runs in verl's own environment (`make peers`).

    python verl_advantages.py             answers advantages.py
    python verl_advantages.py IN OUT      reads a list of (estimator, columns, options), and writes verl's
                                          advantages and returns for each
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from advantage_common import AdvantageSide
from sides import serve
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn


class Config(dict[str, Any]):
    """Keys of `algorithm` with the two ways in which verl reads them: as attributes and by `get`."""

    __getattr__ = dict.__getitem__


def estimate(name: str, columns: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Call one of verl's estimators on padded columns (B, T) of responses.

    `group` (B) replaces verl's uids. `reward_components` (B, K) replaces what verl's rewards return besides
    the score.
    """
    given = dict(columns)
    components = given.pop("reward_components", None)
    given["index"] = np.array([f"prompt {number}" for number in given.pop("group").tolist()], dtype=object)
    config = Config({"gamma": 1.0} | options)
    if name == "gdpo":
        keys = [f"component {k}" for k in range(components.shape[1])]
        given["non_tensor_batch"] = dict(zip(keys, components.T.numpy(), strict=True))
        attention = torch.cat((torch.ones(len(components), 1), given["response_mask"]), 1).long()
        given["batch"] = {"prompts": attention[:, :1], "attention_mask": attention}
        config |= {"gdpo_reward_keys": keys}
    estimator = get_adv_estimator_fn(name)
    wanted = inspect.signature(estimator).parameters
    given |= {"config": config} | options
    advantages, returns = estimator(**{key: value for key, value in given.items() if key in wanted})
    return advantages, returns


def answer(inputs: Path, outputs: Path) -> None:
    torch.save([estimate(*case) for case in torch.load(inputs, weights_only=False)], outputs)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        answer(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        serve(AdvantageSide(estimate, f"verl {verl.__version__}").methods())
