"""Joining a Ray cluster leaves the controller's process as it was."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_the_controllers_breakpoint_is_the_users() -> None:
    """Ray would have its own debugger there, and in every process started from here."""
    assert "PYTHONBREAKPOINT" not in os.environ
