from types import SimpleNamespace

import pytest
import torch

from tandem.workers.base import EngineWorker


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_worker_says_it_of_each_engine_that_it_holds(kind):
    said = []
    worker = SimpleNamespace(
        engines={}, device=torch.device(kind), say=said.append, register_mesh=lambda *_, **__: None
    )
    for role in ("actor", "critic"):
        engine = SimpleNamespace(
            kernels=f"layers of {role}",
            share=SimpleNamespace(rank=0, size=1, leads=True),
            state_info=lambda: {"trainable_parameters": 7, "parameters": 7},
            offload=lambda: None,
        )
        assert EngineWorker.hold(worker, role, engine) is engine
    told = ["actor: layers of actor.", "critic: layers of critic."]
    assert said == (told if kind == "cuda" else [])
