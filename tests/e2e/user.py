from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.cli.main import main
from tests.e2e.shop import Shop


@dataclass(frozen=True)
class Outcome:
    """The result of a command: exit status, standard and error output, and the run folder."""

    status: int
    said: str
    error: str
    folder: Path


class User:
    def __init__(self, shop: Shop, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.shop = shop
        self.folder = folder
        self._capsys = capsys

    def types(self, *words: str, run: str = "run") -> Outcome:
        self._capsys.readouterr()
        folder = self.folder / run
        status = main(["train", *self.shop.short(run, f"trainer.default_local_dir={folder}", *words)])
        captured = self._capsys.readouterr()
        print(captured.err)
        return Outcome(status, captured.out, captured.err, folder)

    def is_refused(self, *words: str, telling: tuple[str, ...]) -> Outcome:
        """Check that the command is refused before anything is written, with every text of `telling`."""
        outcome = self.types(*words)
        assert outcome.status == 1
        for text in telling:
            assert text in outcome.error, text
        assert "Traceback" not in outcome.error
        assert not outcome.folder.exists()
        return outcome


@pytest.fixture
def user(shop, tmp_path, capsys):
    return User(shop, tmp_path, capsys)
