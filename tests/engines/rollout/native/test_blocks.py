import numpy as np
import pytest

from tandem.engines.rollout.native.blocks import BlockManager, chain


def digests(*names):
    return [name.encode() for name in names]


def test_released_blocks_are_found_until_they_are_needed():
    manager = BlockManager(5)
    old, young = manager.allocate(2), manager.allocate(2)
    manager.remember(old, digests("a", "ab"))
    manager.remember(young, digests("x", "xy"))
    manager.release(old)
    manager.release(young)
    assert manager.find(digests("a", "ab", "abc")).tolist() == [*old, -1]
    assert manager.allocate(1).tolist() == [4]  # a block that was never used, so nothing is lost
    assert manager.allocate(1).tolist() == [old[1]] and manager.find(digests("a", "ab")).tolist() == [
        old[0],
        -1,
    ]
    manager.share(old[:1])
    assert manager.allocate(2).tolist() == [young[1], young[0]] and manager.find(digests("x")).tolist() == [
        -1
    ]
    assert manager.find(digests("a")).tolist() == [old[0]]


def test_of_equal_blocks_the_first_is_found():
    manager = BlockManager(5)
    table, second = manager.allocate(3), manager.allocate(1)
    manager.remember(table[[0, 2]], digests("a", "abc"))
    assert manager.find(digests("a", "ab", "abc")).tolist() == [table[0], -1, table[2]]
    manager.remember(second, digests("a"))
    manager.release(second)
    assert manager.find(digests("a")).tolist() == [table[0]]
    manager.check([table])
    with pytest.raises(AssertionError, match="holders"):  # a leak
        manager.check([table[:2]])


def test_growth_adds_free_blocks():
    manager = BlockManager(2)
    table = manager.allocate(2)
    manager.grow(5)
    assert manager.free == 3 and sorted([*table, *manager.allocate(3)]) == [0, 1, 2, 3, 4]


def test_any_order_of_operations_keeps_the_books():
    rng = np.random.default_rng(0)
    manager = BlockManager(24)
    tables, content = [], {}  # the sequences; block → its last content
    for step in range(2000):
        action = rng.integers(4)
        if action == 0 and manager.free >= 4:
            names = digests(*(f"{rng.integers(6)}:{i}" for i in range(rng.integers(1, 5))))
            found = manager.find(names)
            found = found[: np.append(found, -1).argmin()]  # the known prefix
            assert all(content[block] == name for block, name in zip(found.tolist(), names, strict=False))
            manager.share(found)
            table = np.concatenate((found, manager.allocate(len(names) - len(found))))
            content.update(zip(table.tolist(), names, strict=True))
            manager.remember(table, names)
            tables.append(table)
        elif action == 1 and tables:
            table = tables[rng.integers(len(tables))][: rng.integers(1, 4)]
            manager.share(table)
            tables.append(table)
        elif action >= 2 and tables:
            manager.release(tables.pop(rng.integers(len(tables))))
        if step % 500 == 499:
            manager.forget()
            content.clear()  # what is found from now on was remembered since
        manager.check(tables)
    for table in tables:
        manager.release(table)
    assert manager.free == 24


def test_a_digest_stands_for_the_whole_prefix():
    ids = np.arange(10)
    known = []
    chain(b"root", known, ids, 4)
    assert len(known) == 2
    before = list(known)
    chain(b"root", known, np.arange(13), 4)  # continues where it ended
    assert known[:2] == before and len(known) == 3
    for root, other in ((b"other", ids), (b"root", np.concatenate(([9], ids[1:])))):
        changed = []
        chain(root, changed, other, 4)
        assert not set(changed) & set(known)
