"""A function that gives one weight stream to several readers."""

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
    """Let several readers read the same weight stream at the same time.

    Each reader has its own thread, and all readers read the same tensor at the same time. The stream advances
    in the caller's thread, because a tensor is valid only until the next one is requested.

    Args:
        source: The stream.
        readers: Functions that read a stream and return a digest.

    Returns:
        For each reader, the digest that the reader returned or the EngineError that it raised. A reader that
        fails does not affect the others.

    Raises:
        EngineError: The source or a reader took more than 30 minutes for one tensor, or a reader took more
            than 30 minutes after the last tensor.
    """
    step = threading.Barrier(len(readers) + 1, timeout=_LIMIT_S)
    shown: list[tuple[str, Tensor]] = []  # the current tensor; empty at the end of the stream
    outcomes: list[Digest | Exception] = [{} for _ in readers]

    def run(index: int) -> None:
        stream = _items(shown, step)
        try:
            outcomes[index] = readers[index](WeightStream(stream))
        except Exception as error:  # the outcomes, which the caller's thread returns or raises
            outcomes[index] = error
        with suppress(threading.BrokenBarrierError):  # the stream has failed, and `_feed` reports why
            for _ in stream:  # read the remaining tensors for this reader, so that the other readers continue
                pass

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(readers))]
    for thread in threads:
        thread.start()
    _feed(iter(source.tensors), shown, step)
    for thread in threads:
        thread.join(_LIMIT_S)
        if thread.is_alive():
            raise _too_slow("a reader", "its work after the last tensor")
    found: list[Outcome] = []
    for result in outcomes:
        if isinstance(result, Exception) and not isinstance(result, EngineError):
            raise result
        found.append(result)
    return found


def _feed(
    tensors: Iterator[tuple[str, Tensor]], shown: list[tuple[str, Tensor]], step: threading.Barrier
) -> None:
    """Put each tensor into `shown`, and wait until all readers have used it."""
    try:
        while True:
            shown[:] = islice(tensors, 1)
            if step.broken:  # the readers waited longer than the limit
                raise _too_slow("the source", "one tensor")
            step.wait()  # the tensor is ready
            if not shown:
                return
            step.wait()  # all readers are done with the tensor
    except threading.BrokenBarrierError:
        raise _too_slow("a reader", "one tensor") from None
    except BaseException:
        step.abort()  # stops the readers
        raise


def _items(shown: list[tuple[str, Tensor]], step: threading.Barrier) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `_feed` puts into `shown` to one reader."""
    while True:
        step.wait()
        if not shown:
            return
        yield shown[0]
        step.wait()


def _too_slow(who: str, what: str) -> EngineError:
    return EngineError(f"{who} of the weights took more than {_LIMIT_S:.0f} s for {what}")
