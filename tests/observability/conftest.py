import socket

import pytest

from tests.support.runs import lab

__all__ = ["lab"]


@pytest.fixture
def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
