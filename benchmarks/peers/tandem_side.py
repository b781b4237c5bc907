"""A side of ledger.py: a tree of Tandem, which PYTHONPATH selects.

This file must work with all commits that the ledger names, so it uses only their common interface.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from sides import serve
from transformers import AutoModelForCausalLM

from tandem.config.load import load_train_config
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.protocol import Request, SamplingParams

BUILDERS = ("tandem.trainer.assembly", "tandem.trainer.build")
"""The modules with `build_ppo`: the current one, and the one of older commits."""


def build_trainer(overrides: Sequence[str]) -> Any:
    for name in BUILDERS:
        try:
            build = import_module(name).build_ppo
        except ModuleNotFoundError:
            continue
        return build(load_train_config(None, list(overrides)).config, say=lambda _: None)
    sys.exit(f"this tree has no build_ppo in any of {', '.join(BUILDERS)}")


def set_lengths(lengths: Sequence[int]) -> None:
    """Make each request of a batch write its own number of tokens. No token ends a response."""
    submit = NativeEngine.submit

    def forced(self: NativeEngine, requests: Sequence[Request]) -> None:
        rows = zip(requests, lengths, strict=True)
        submit(self, [replace(r, params=replace(r.params, max_tokens=n, stop_token_ids=())) for r, n in rows])

    NativeEngine.submit = forced  # type: ignore[method-assign]


class TandemSide:
    """The requests of ledger.py."""

    def __init__(self) -> None:
        self._step = 0
        self._open = ExitStack()

    def open_training(self, overrides: list[str], lengths: list[int]) -> int:
        """Build the trainer; return the number of threads."""
        set_lengths(lengths)
        folder = self._open.enter_context(tempfile.TemporaryDirectory())
        self._trainer = build_trainer([*overrides, f"trainer.default_local_dir={folder}/run"])
        session = self._open.enter_context(self._trainer.session)
        session.restore(self._trainer.load_state_dict)
        return torch.get_num_threads()

    def step(self) -> dict[str, float]:
        """Do one step; return the seconds of the step, of generation and of the update."""
        self._step += 1
        began = time.perf_counter()
        self._trainer.step(self._step, self._trainer.prompts.next())
        took = {"step": time.perf_counter() - began}
        phases = self._trainer.roles.actor.take_timings()[0]
        names = {"generation": "timing/generate_sequences", "update": "timing/update_actor"}
        return took | {name: phases[key] for name, key in names.items()}

    def open_rollout(self, model: str, max_length: int, max_num_seqs: int) -> int:
        """Load the model; return the number of threads."""
        self._module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._module.requires_grad_(False)
        self._options = {"max_length": max_length, "max_num_seqs": max_num_seqs}
        return torch.get_num_threads()

    def rollout(self, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, float]:
        """Write the responses as in a training step; return the seconds."""
        requests = [
            Request(str(row), 0, np.array(ids), SamplingParams(max_tokens=most))
            for row, (ids, most) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        began = time.perf_counter()
        engine = NativeEngine(device=torch.device("cpu"), **self._options)
        engine.update_weights(SharedModule(self._module), 0)
        samples = generate(engine, requests)
        engine.sleep()
        took = time.perf_counter() - began
        assert [len(sample.token_ids) for sample in samples] == max_tokens
        return {"rollout": took}

    def close(self) -> None:
        self._open.close()


if __name__ == "__main__":
    side = TandemSide()
    serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_")})
