"""Divide weighted items into sets of nearly equal weight, to balance tokens over ranks or micro-batches.

The method is Karmarkar–Karp largest differencing (Karmarkar & Karp 1982; for k parts: Korf 1998). This
module does not need torch.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from tandem.errors import ConfigError

EXACTING = 1 << 14  # differencing takes less than about 20 ms up to this number of items · parts


def partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divide items into `parts` sets of nearly equal total weight.

    The method is largest differencing. If items · parts exceeds `EXACTING`, the heaviest remaining item
    goes to the lightest set instead (Graham 1969). This takes milliseconds, and the sets differ by at most
    one item.

    Args:
        weights: one number >= 0 per item, such as its tokens.
        parts: number of sets. If there are more sets than items, some sets are empty.

    Returns:
        For each set, the ascending indices of its items. The heaviest set is first. The same input always
        gives the same result.

    Raises:
        ConfigError: `parts` is less than one.
    """
    if parts < 1:
        raise ConfigError("must be at least one", field="parts", got=parts, expected=">= 1")
    few = len(weights) * parts <= EXACTING
    return _by_differencing(weights, parts) if few else _heaviest_first(weights, parts)


def _by_differencing(weights: Sequence[int], parts: int) -> list[list[int]]:
    # A state is a partial solution: its sets heaviest first. The two states with the largest spread
    # are merged, heaviest set with lightest, until one state remains. The counter breaks ties.
    empty: list[tuple[int, list[int]]] = [(0, [])] * (parts - 1)
    heap = [(-weight, item, [(weight, [item]), *empty]) for item, weight in enumerate(weights)]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [
            (a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
        order += 1
    sets = heap[0][2] if heap else [(0, [])] * parts
    return [sorted(items) for _, items in sets]


def _heaviest_first(weights: Sequence[int], parts: int) -> list[list[int]]:
    sets = dealt(weights, [len(weights)] * parts)
    return sorted(sets, key=lambda items: -sum(weights[item] for item in items))


def dealt(weights: Sequence[float], sizes: Sequence[int]) -> list[list[int]]:
    """Divide items into sets of given sizes and nearly equal weight.

    The heaviest remaining item goes to the lightest set that is not full (Graham 1969).

    Args:
        weights: one number >= 0 per item.
        sizes: number of items of each set; their sum is the number of items.

    Returns:
        For each set, the ascending indices of its items.
    """
    sets: list[list[int]] = [[] for _ in sizes]
    totals = [(0.0, part) for part, size in enumerate(sizes) if size]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        total, lightest = heapq.heappop(totals)
        sets[lightest].append(item)
        if len(sets[lightest]) < sizes[lightest]:
            heapq.heappush(totals, (total + weights[item], lightest))
    return [sorted(items) for items in sets]


def even(count: int, parts: int) -> list[slice]:
    """Return `parts` successive slices of `count` items. Their sizes differ by at most one."""
    base, extra = divmod(count, parts)
    starts = [i * base + min(i, extra) for i in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def within_budget(weights: Sequence[int], budget: int, at_least: int = 1) -> list[list[int]]:
    """Divide items into a small number of sets with nearly equal weight, none above `budget`.

    Args:
        weights: one number >= 0 per item.
        budget: largest weight of a set.
        at_least: minimum number of sets, unless there are fewer items.

    Returns:
        For each set, the indices of its items. No set is empty. Without items, the result is [].

    Raises:
        ConfigError: a single item is heavier than the budget.
    """
    _check_budget(weights, budget)
    if not weights:
        return []
    parts = max(at_least, -(-sum(weights) // budget))
    while True:
        sets = partition(weights, parts)
        if max(sum(weights[item] for item in items) for items in sets) <= budget:
            return [items for items in sets if items]
        parts += 1


def within_padded_budget(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Divide items into sets of similar weight, where each item costs as much as the heaviest of its set.

    Args:
        weights: one number >= 0 per item.
        budget: largest cost of a set: its heaviest weight times the number of its items.

    Returns:
        For each set, the indices of its items, heaviest first. Without items, the result is [].

    Raises:
        ConfigError: a single item is heavier than the budget.
    """
    _check_budget(weights, budget)
    sets: list[list[int]] = []
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        if not sets or (len(sets[-1]) + 1) * weights[sets[-1][0]] > budget:
            sets.append([])
        sets[-1].append(item)
    return sets


def _check_budget(weights: Sequence[int], budget: int) -> None:
    if max(weights, default=0) > budget:
        raise ConfigError(
            "a single sequence exceeds the token budget",
            got=f"{max(weights)} tokens",
            expected=f"<= {budget}",
            remedy="raise the *max_token_len_per_gpu key, or shorten prompts and responses",
        )
