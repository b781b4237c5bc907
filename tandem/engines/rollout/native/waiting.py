"""Requests that wait for a row, grouped by prompt so that the samples of one prompt are admitted
together and share its prefill. Order depends on the order of submission alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.engines.rollout.native.cache import Prefill
from tandem.protocol import Request

# A batch of prompts is a rectangle. A longer-to-shorter run of prompts is cut where padding would
# exceed this share of it, if it is large enough to fill a matmul.
_PADDING_SHARE = 0.15
_SMALL_RECTANGLE = 512


@dataclass(slots=True)
class WaitingPrompt:
    """One prompt and its requests not yet admitted.

    Attributes:
        prefill: the prompt's keys, values and logits, kept while only some of its samples found a row.
    """

    prompt_ids: np.ndarray
    requests: list[Request] = field(default_factory=list)
    prefill: Prefill | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """Requests of one prompt that get rows now; `prompt.prefill` is None if it must be computed."""

    prompt: WaitingPrompt
    requests: list[Request]


class Waiting:
    """The queue. A prompt's place is that of its first request."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, bytes], WaitingPrompt] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for prompt in self._prompts.values():
            yield from prompt.requests

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            key = _prompt_key(request)
            if key not in self._prompts:
                self._prompts[key] = WaitingPrompt(request.prompt_ids)
            self._prompts[key].requests.append(request)
        self._count += len(requests)

    def drop(self, ids: Collection[tuple[str, int]]) -> list[Request]:
        """Removes and returns the requests of those ids that are waiting."""
        dropped = []
        for key, prompt in list(self._prompts.items()):
            dropped += [request for request in prompt.requests if request.id in ids]
            prompt.requests = [request for request in prompt.requests if request.id not in ids]
            if not prompt.requests:
                del self._prompts[key]
        self._count -= len(dropped)
        return dropped

    def forget_prefills(self) -> None:
        for prompt in self._prompts.values():
            prompt.prefill = None

    def admit(self, free_rows: int, token_budget: int) -> list[Admission]:
        """Takes requests from the front while rows and prefill tokens last. The first prompt is taken
        even if it alone exceeds the budget."""
        admissions: list[Admission] = []
        tokens = 0
        while self._prompts and free_rows:
            key, prompt = next(iter(self._prompts.items()))
            cost = len(prompt.prompt_ids) if prompt.prefill is None else 0
            if tokens and tokens + cost > token_budget:
                break
            tokens += cost
            taken, prompt.requests = prompt.requests[:free_rows], prompt.requests[free_rows:]
            free_rows -= len(taken)
            self._count -= len(taken)
            admissions.append(Admission(prompt, taken))
            if not prompt.requests:
                del self._prompts[key]
        return admissions


def rectangles(admissions: Sequence[Admission]) -> list[list[Admission]]:
    """Cuts prompts to prefill into batches of similar length, longest first."""
    batches: list[list[Admission]] = []
    tokens = 0
    for admission in sorted(admissions, key=lambda a: -len(a.prompt.prompt_ids)):
        length = len(admission.prompt.prompt_ids)
        if batches:
            area = len(batches[-1][0].prompt.prompt_ids) * (len(batches[-1]) + 1)
            wasteful = area - tokens - length > _PADDING_SHARE * area and area > _SMALL_RECTANGLE
        if not batches or wasteful:
            batches.append([])
            tokens = 0
        batches[-1].append(admission)
        tokens += length
    return batches


def _prompt_key(request: Request) -> tuple[str, bytes]:
    return request.uid, np.ascontiguousarray(request.prompt_ids, dtype=np.int64).tobytes()
