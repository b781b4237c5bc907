"""The message about a rollout engine that is not installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.config.rollout import RolloutConfig
from tandem.engines.rollout.vllm import process
from tandem.errors import ConfigError
from tandem.trainer import here


def test_a_rollout_on_vllm_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (here, process):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=RolloutConfig(name="vllm")))
    with pytest.raises(ConfigError, match="vLLM is not installed") as caught:
        here._vllm(config)
    assert caught.value.field == "actor_rollout_ref.rollout.name" and caught.value.got == "vllm"
