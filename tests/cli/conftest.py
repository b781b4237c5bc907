"""Fixtures: runs and supervised runs on a tiny model, and functions that run a command line."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.cli.main import main
from tests.support.runs import lab
from tests.support.school import school

__all__ = ["lab", "school"]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command line and returns its status, output and errors."""

    def run(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([str(word) for word in words]), *capsys.readouterr()

    return run


@pytest.fixture
def printed(typed) -> Callable[..., str]:
    """Return a function that runs a command line that succeeds, and returns its output."""

    def run(*words: Any) -> str:
        status, out, err = typed(*words)
        assert status == 0, err
        return out

    return run


@pytest.fixture
def refused(typed) -> Callable[..., str]:
    """Return a function that runs a command line that exits with 1, and returns its errors."""

    def run(*words: Any) -> str:
        status, _, err = typed(*words)
        assert status == 1, words
        return err

    return run
