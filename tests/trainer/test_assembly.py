from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.config.rollout import RolloutConfig
from tandem.engines.rollout.vllm import process
from tandem.errors import ConfigError
from tandem.trainer import assembly, here

OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload"
HOST = "actor_rollout_ref.actor.optim.optimizer=adamw_cpu"
ACTIVATIONS = "actor_rollout_ref.model.enable_activation_offload"


@pytest.mark.parametrize(
    ("backend", "device", "told"),
    [("local", "auto", True), ("local", "cpu", True), ("ray", "cpu", True), ("ray", "auto", False)],
)
def test_offload_without_effect(lab, monkeypatch, backend, device, told):
    """On Ray, this machine's devices are not the workers' devices, so there is no message."""
    monkeypatch.setattr(assembly, "make_backend", Mock(side_effect=ConfigError("no backend here")))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said: list[str] = []
    where = f"trainer.backend={backend} trainer.device={device}"
    words = ("A.fsdp_config.param_offload=true M.enable_activation_offload=true", HOST, where)
    with pytest.raises(ConfigError, match="no backend here"):
        lab.trainer(lab.folder / "unmade", *words, said=said)
    sentences = [
        f"{OFFLOAD}, {HOST}: no effect on a CPU, where everything is in host memory already.",
        f"{ACTIVATIONS}: on a CPU nothing is moved; its size is only counted.",
    ]
    assert said == sentences * told


@pytest.mark.parametrize(
    "words",
    ["A.use_kl_loss=true A.kl_loss_type=", "algorithm.use_kl_in_reward=true algorithm.kl_penalty="],
)
def test_a_kl_estimate_that_cannot_be_used_is_refused_before_anything_is_made(lab, monkeypatch, words):
    monkeypatch.setattr(assembly, "make_backend", lambda *_: pytest.fail("a backend is made"))
    own = lab.folder / "own_kl.py"
    own.write_text("def distance(log_probs, reference):\n    return log_probs - reference\n")
    with pytest.raises(ConfigError, match="'reference' is not a column"):
        lab.trainer(lab.folder / "unmade", f"{words}{own}:distance")


def test_a_rollout_on_vllm_needs_vllm(monkeypatch):
    for module in (here, process):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=RolloutConfig(name="vllm")))
    with pytest.raises(ConfigError, match="vLLM is not installed") as caught:
        here._vllm(config)
    assert caught.value.field == "actor_rollout_ref.rollout.name" and caught.value.got == "vllm"
