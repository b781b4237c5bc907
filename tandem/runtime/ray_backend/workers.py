"""The workers of one role on Ray."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from tandem.protocol import DataProto
from tandem.runtime.backend import StreamPart, Usage
from tandem.runtime.dispatch import Call
from tandem.runtime.future import BatchFuture, Handle
from tandem.runtime.ray_backend.actor import Actor, packed_call, packed_index
from tandem.runtime.ray_backend.handles import RayHandle
from tandem.runtime.ray_backend.result_group import ResultGroup
from tandem.runtime.ray_backend.watch import Watch


class RayWorkers:
    """The workers of one role on Ray; see `Workers`.

    Args:
        role: The name of the role.
        actors: The process of each rank.
        watch: The controller's watch.
    """

    def __init__(self, role: str, actors: Sequence[Actor], watch: Watch) -> None:
        self._role = role
        self._actors = actors
        self._watch = watch

    @property
    def world_size(self) -> int:
        return len(self._actors)

    def call(self, method: str, calls: Sequence[Call | None], *, keeps: bool) -> list[Handle | None]:
        handles: list[Handle | None] = []
        group = ResultGroup()
        for actor, call in zip(self._actors, _with_shared_batches(calls), strict=True):
            if call is None:
                handles.append(None)
                continue
            packed = packed_call(self._role, method, call)
            index, value = actor.run_kept.remote(packed) if keeps else (None, actor.run.remote(packed))
            handles.append(RayHandle(value, index, self._watch, group))
            self._watch.sent(actor, self._role, method, handles[-1])
        return handles

    def stream(self, method: str, calls: Sequence[Call | None]) -> Iterator[StreamPart]:
        ranks, ends = {}, []
        for rank, (actor, call) in enumerate(zip(self._actors, _with_shared_batches(calls), strict=True)):
            if call is not None:
                packed = packed_call(self._role, method, call)
                parts = actor.run_parts.options(num_returns="streaming").remote(packed)
                ends.append(RayHandle(parts.completed(), None, self._watch))
                self._watch.sent(actor, self._role, method, ends[-1])
                ranks[parts] = rank
        return self._merged(ranks, ends)

    def _merged(self, ranks: dict[Any, int], ends: list[RayHandle]) -> Iterator[StreamPart]:
        while ranks:
            stream = self._watch.ready(list(ranks))
            try:
                part = next(stream)
            except StopIteration:
                del ranks[stream]
                continue
            rows, index = self._watch.get(part)
            value = next(self._watch.ready([stream]))
            self._watch.index_bytes += len(index) + len(pickle.dumps(rows))
            yield StreamPart(ranks[stream], rows, RayHandle(value, index, self._watch))
        for end in ends:
            end.wait()

    def take_usage(self) -> list[Usage]:
        taken = [actor.take_usage.remote(self._role) for actor in self._actors]
        return [self._watch.get(ref) for ref in taken]

    def shutdown(self) -> None:
        """Remove the workers. Their processes run until the backend stops them."""
        removed = [actor.remove.remote(self._role) for actor in self._actors]
        for ref in removed:
            self._watch.get(ref)


def _with_shared_batches(calls: Sequence[Call | None]) -> list[Call | None]:
    """Return the calls; each batch in several calls is put into the object store once and referenced."""
    given = Counter(
        id(argument)
        for call in calls
        if call is not None
        for argument in (*call[0], *call[1].values())
        if isinstance(argument, DataProto)
    )
    futures: dict[int, BatchFuture] = {}

    def sent(argument: Any) -> Any:
        if given[id(argument)] < 2:
            return argument
        if id(argument) not in futures:
            handle = RayHandle(ray.put(argument), packed_index(argument))
            futures[id(argument)] = BatchFuture.collected([handle], "an argument")
        return futures[id(argument)]

    return [
        call and (tuple(map(sent, call[0])), {name: sent(argument) for name, argument in call[1].items()})
        for call in calls
    ]
