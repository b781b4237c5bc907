"""A user's file with a worker class whose checkpoints take long to write in the background, or fail."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

from tandem.workers.actor import ActorWorker

SECONDS = float(os.environ.get("SLOW_WRITES_S", "1.5"))


def slowed(write: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(write)
    def run() -> None:
        time.sleep(SECONDS)
        write()

    return run


class SlowWrites(ActorWorker):
    """An actor with slow checkpoints; its first checkpoint is quick."""

    _begun = 0

    def begin_save(self, path: Path) -> None:
        engine = self.actor
        stage = engine.stage
        self._begun += 1
        if self._begun > 1:
            engine.stage = lambda at: slowed(stage(at))  # type: ignore[method-assign]
        try:
            super().begin_save(path)
        finally:
            engine.stage = stage  # type: ignore[method-assign]
