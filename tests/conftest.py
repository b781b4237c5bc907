"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start a process for each rank come one after the other: they have limits of time, and each
    wants the machine for itself."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()) or "ray" in item.path.stem.split("_"):
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this test process's own, for all its tests."""
    import_module("tandem.runtime.ray_backend.cluster").connect(None, temp_dir=None, object_store_gb=1.0)
    yield
    import_module("ray").shutdown()
