from collections.abc import Iterator

import pytest

from tests.runtime.multi_worker import ThreadBackend


@pytest.fixture
def threads() -> Iterator[ThreadBackend]:
    backend = ThreadBackend()
    yield backend
    backend.shutdown()
