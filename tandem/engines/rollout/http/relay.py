"""One stream of weights for several readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from tandem.engines.rollout.base import WeightStream
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError

Outcome = Digest | EngineError
_LIMIT_S = 1800.0


def relay(source: WeightStream, readers: Sequence[Callable[[WeightStream], Digest]]) -> list[Outcome]:
    """Gives each reader the whole stream. They read in step, each in a thread of its own, and the stream is
    advanced in this one: a tensor is only valid until the next is asked for.

    Returns:
        what each reader gave back, or its EngineError; the others do not notice a reader that fails.

    Raises:
        EngineError: the source or a reader took more than 30 minutes for one tensor, or a reader for what it
            does after the last.
    """
    steps = _Steps(len(readers))
    outcomes: list[Digest | Exception] = [{} for _ in readers]

    def run(index: int) -> None:
        stream = steps.items()
        try:
            outcomes[index] = readers[index](WeightStream(stream))
        except Exception as error:  # returned, or raised, in the caller's thread
            outcomes[index] = error
        with suppress(threading.BrokenBarrierError):  # the stream has ended, and feed says why
            for _ in stream:  # what a reader leaves, so that the others get on
                pass

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(readers))]
    for thread in threads:
        thread.start()
    steps.feed(source.tensors)
    for thread in threads:
        thread.join(_LIMIT_S)
        if thread.is_alive():
            raise _too_slow("a reader", "what it does with the weights")
    found: list[Outcome] = []
    for result in outcomes:
        if isinstance(result, Exception) and not isinstance(result, EngineError):
            raise result
        found.append(result)
    return found


class _Steps:
    """Each item is shown to all readers before the next is asked for."""

    def __init__(self, readers: int) -> None:
        self._step = threading.Barrier(readers + 1, timeout=_LIMIT_S)
        self._item: tuple[str, Tensor] | None = None

    def feed(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        try:
            for self._item in tensors:
                self._check_in_time()
                self._step.wait()  # it is there
                self._step.wait()  # all are done with it
            self._item = None
            self._check_in_time()
            self._step.wait()
        except threading.BrokenBarrierError:
            raise _too_slow("a reader", "one tensor") from None
        except BaseException:
            self._step.abort()  # the readers stop
            raise

    def _check_in_time(self) -> None:
        """Checks that the source was in time; its readers wait for no longer than the limit."""
        if self._step.broken:
            raise _too_slow("the source", "one tensor")

    def items(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            self._step.wait()
            if self._item is None:
                return
            yield self._item
            self._step.wait()


def _too_slow(who: str, what: str) -> EngineError:
    return EngineError(f"{who} of the weights took more than {_LIMIT_S:.0f} s for {what}")
