"""What tests of several folders share."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.support.warm import warm_ray

if not Path("/dev/nvidiactl").exists():  # Triton asks when it is first imported, which transformers does
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no folder is looked for in the cache alone
# The key by which a user's own files are known is not put into the home of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"tandem-tests-state-{os.getuid()}"))

LONGEST = (
    "ray",
    "tests/sandbox/test_attacks.py",
    "tests/benchmarks/test_tiny.py",
    "tests/engines/train/test_compiled_engine.py",
    "tests/e2e/test_trouble.py",
    "tests/engines/train/test_pipeline_engine.py",
    "tests/engines/train/test_lora_engine.py",
    "tests/e2e/test_algorithm_grid.py",
    "tests/engines/train/test_tensor_parallel_engine.py",
    "tests/engines/train/test_wrap_policy.py",
    "tests/engines/train/test_optimizers.py",
    "tests/e2e/test_kill.py",
    "tests/engines/rollout/native/test_stress.py",
    "tests/trainer/test_resume.py",
    "tests/e2e/test_without_ray.py",
    "tests/engines/train/test_activation_memory.py",
    "tests/engines/train/test_sharded_load.py",
    "tests/offline/test_export_memory.py",
    "tests/engines/train/test_grid.py",
    "tests/engines/train/test_fsdp_two_ranks.py",
    "tests/docs/test_algorithm_pages.py",
)
"""The scopes that take longest: they begin first, so that the workers end together."""


def scope_of(nodeid: str) -> str:
    return "ray" if re.search(r"[_\[-]ray(backend)?[_\].-]", nodeid.lower()) else nodeid.split("::")[0]


class OneRayAtATime(LoadScopeScheduling):
    """Tests that start a process for each rank, "ray" in the name of their file or parameter, all run in one
    worker: they have limits of time, and each wants the machine for itself. So do those of one file, which
    share what it made for them. (`--dist loadgroup` would read the same from marks, but xdist 3.8 cannot
    pass them on under pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {scope: place for place, scope in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(scope_of(item.nodeid), len(places)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneRayAtATime:
    config.option.loadscopereorder = False  # which would be by the number of tests
    return OneRayAtATime(config, log)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this test process's own, for all its tests, whose workers begin warm."""
    warm_ray()
    import_module("tandem.runtime.ray_backend.cluster").connect(None, temp_dir=None, object_store_gb=1.0)
    yield
    import_module("ray").shutdown()
