import os
import re
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.support.warm import warm_ray

if not Path("/dev/nvidiactl").exists():  # Triton reads this at its first import, by transformers
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"  # look up model names in the cache only
# Keep out of the user's home folder: the key that signs own files, and the folders of changed models.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"tandem-tests-state-{os.getuid()}"))
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir(), f"tandem-tests-cache-{os.getuid()}"))

LONGEST = (
    "ray",
    "tests/sandbox/test_attacks.py",
    "tests/benchmarks/test_tiny.py",
    "tests/engines/train/test_compiled_engine.py",
    "tests/e2e/test_trouble.py",
    "tests/engines/train/test_divisions.py",
    "tests/engines/train/test_lora_engine.py",
    "tests/e2e/test_algorithm_grid.py",
    "tests/engines/train/test_wrap_policy.py",
    "tests/engines/train/test_optimizers.py",
    "tests/e2e/test_kill.py",
    "tests/engines/rollout/native/test_stress.py",
    "tests/trainer/test_resume.py",
    "tests/e2e/test_without_ray.py",
    "tests/engines/train/test_activation_memory.py",
    "tests/engines/train/test_sharded_load.py",
    "tests/offline/test_export_memory.py",
    "tests/engines/train/test_fsdp_two_ranks.py",
    "tests/docs/test_algorithm_pages.py",
)
"""The scopes that take longest. They start first, so that all workers end at about the same time."""


def scope_of(nodeid: str) -> str:
    return "ray" if re.search(r"[_\[-]ray(backend)?[_\].-]", nodeid.lower()) else nodeid.split("::")[0]


class OneRayAtATime(LoadScopeScheduling):
    """Runs all tests with processes per rank in one worker: they have time limits, and need the machine."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {scope: place for place, scope in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(scope_of(item.nodeid), len(places)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneRayAtATime:
    config.option.loadscopereorder = False  # xdist would order scopes by their number of tests
    return OneRayAtATime(config, log)


@pytest.fixture(scope="session")
def ray_cluster():
    warm_ray()
    import_module("tandem.runtime.ray_backend.cluster").connect(None, temp_dir=None, object_store_gb=1.0)
    yield
    import_module("ray").shutdown()
