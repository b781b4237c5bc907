"""One stream of weights for several readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

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
    step = threading.Barrier(len(readers) + 1, timeout=_LIMIT_S)
    shown: list[tuple[str, Tensor]] = []  # one at a time; none at the end
    outcomes: list[Digest | Exception] = [{} for _ in readers]

    def run(index: int) -> None:
        stream = _items(shown, step)
        try:
            outcomes[index] = readers[index](WeightStream(stream))
        except Exception as error:  # returned, or raised, in the caller's thread
            outcomes[index] = error
        with suppress(threading.BrokenBarrierError):  # the stream has ended, and `_feed` says why
            for _ in stream:  # what a reader leaves, so that the others get on
                pass

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(readers))]
    for thread in threads:
        thread.start()
    _feed(iter(source.tensors), shown, step)
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


def _feed(
    tensors: Iterator[tuple[str, Tensor]], shown: list[tuple[str, Tensor]], step: threading.Barrier
) -> None:
    """Show each tensor to all readers before the next is asked for."""
    try:
        while True:
            shown[:] = islice(tensors, 1)
            if step.broken:  # the readers wait for no longer than the limit
                raise _too_slow("the source", "one tensor")
            step.wait()  # it is there
            if not shown:
                return
            step.wait()  # all are done with it
    except threading.BrokenBarrierError:
        raise _too_slow("a reader", "one tensor") from None
    except BaseException:
        step.abort()  # the readers stop
        raise


def _items(shown: list[tuple[str, Tensor]], step: threading.Barrier) -> Iterator[tuple[str, Tensor]]:
    """Give a reader what `_feed` shows."""
    while True:
        step.wait()
        if not shown:
            return
        yield shown[0]
        step.wait()


def _too_slow(who: str, what: str) -> EngineError:
    return EngineError(f"{who} of the weights took more than {_LIMIT_S:.0f} s for {what}")
