"""A user who types commands, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.cli.main import main
from tests.e2e.shop import Shop


@dataclass(frozen=True)
class Outcome:
    """What a command left behind.

    Attributes:
        status: its exit status.
        said, error: what it printed, and what it printed of an error.
        folder: its run folder.
    """

    status: int
    said: str
    error: str
    folder: Path


class User:
    """Types commands."""

    def __init__(self, shop: Shop, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.shop = shop
        self.folder = folder
        self._capsys = capsys

    def types(self, *words: str, run: str = "run") -> Outcome:
        """`tandem train` with a command line that is sound but for `words`."""
        self._capsys.readouterr()
        folder = self.folder / run
        status = main(["train", *self.shop.short(run, f"trainer.default_local_dir={folder}", *words)])
        captured = self._capsys.readouterr()
        print(captured.err)
        return Outcome(status, captured.out, captured.err, folder)

    def is_refused(self, *words: str, telling: tuple[str, ...]) -> Outcome:
        """Before anything is written: every text of `telling` is in the error."""
        outcome = self.types(*words)
        assert outcome.status == 1
        for text in telling:
            assert text in outcome.error, text
        assert "Traceback" not in outcome.error
        assert not outcome.folder.exists()
        return outcome


@pytest.fixture
def user(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> User:
    return User(shop, tmp_path, capsys)
