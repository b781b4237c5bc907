"""Compare the controller's costs of Tandem and verl 0.9.1, in one run on one machine, both on Ray.

tables   DataProto's concat, chunk, reorder and union on 4,096 samples of 2,048 tokens with 6 columns. Tandem
has
         ragged rows, verl padded rows of the same number of bytes.
calls    Blocking calls on 1, 4 and 8 workers. One method does nothing on all workers. The other method gets
its
         share of a small batch from the controller and returns a column of it.
move     A batch of 1 GiB goes from a group of 2 workers to a group of 3, which reads every value. Then half
of
         the batch goes in another order, as in balancing (verl cannot move all of it on a machine of 24 GB).
         Tandem's controller passes on a future, and the rows go from worker to worker. verl's controller
         collects the batch and dispatches it. All other ways of verl are tried too, and the fastest is
         reported.

The sides take turns, and the medians are compared. The floor of a move is the time to copy its bytes once
into shared memory that was used before, and to read them once, on all cores. It is measured between the
turns.

    python benchmarks/dispatch.py [--quick] [--out FILE]

verl runs in its own environment; create it with `make peers`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from peers.sides import Side, seconds, serve
from tiny import arguments, peer
from torch import Tensor

from tandem.protocol import DataProto, Ragged
from tandem.runtime import Dispatch, ResourcePool, Worker, WorkerGroup, register
from tandem.runtime.ray_backend import RayBackend

HERE = Path(__file__).resolve().parent
VERL = HERE.parent / ".peers" / "verl" / "bin" / "python"
PRODUCERS, CONSUMERS = 2, 3
ROWS = 4104  # verl needs a number of rows that divides by both numbers of workers; so must the half
COLUMNS = {"old_log_probs": 1, "ref_log_probs": 1, "values": 1, "advantages": 1, "returns": 1}
WIDE = COLUMNS | {"top_log_probs": 25}
TOKEN_BYTES = 4 * (2 + sum(WIDE.values()))  # 128 bytes, so 4,096 rows of 2,048 tokens are 1 GiB
CORES = os.cpu_count() or 1
Way = tuple[str, str]
"""How verl moves a batch, and how it serialises the batch."""
VERL_WAYS: list[Way] = [(way, how) for way in ("proto", "mesh") for how in ("torch", "numpy")]
VERL_WAYS += [("tensordict", "torch"), ("future", "torch"), ("future", "numpy")]
PLAIN_WAY = VERL_WAYS[0]  # the defaults of the decorator and the environment
Widths = dict[str, int]
"""Column name → float32 values per token. Every batch has the column `tokens` in addition."""


def make_columns(rows: int, length: int, widths: Widths, seed: int) -> dict[str, Ragged]:
    """Make rows of length/2 to 3·length/2 random tokens, rows·length tokens in total."""
    torch.manual_seed(seed)
    spread = torch.randint(length // 2 + 1, (rows // 2,))
    lengths = length + torch.cat([spread, -spread, torch.zeros(rows % 2, dtype=torch.int64)])
    tokens = Ragged.from_lengths(torch.randint(150_000, (rows * length,)), lengths[torch.randperm(rows)])
    shapes = {
        name: (rows * length,) if width == 1 else (rows * length, width) for name, width in widths.items()
    }
    return {"tokens": tokens} | {
        name: tokens.with_values(torch.rand(shape)) for name, shape in shapes.items()
    }


def checksum(columns: Iterable[Any]) -> Tensor:
    """Return the sum over the memory of ragged columns as int64 of shape (1), four bytes at a time."""
    return torch.stack([column.values.view(torch.int32).sum() for column in columns]).sum().reshape(1)


class BenchWorker(Worker):
    """A worker that holds rows of a batch, hands them out, and reads other rows."""

    def __init__(self, rows: int = 0, length: int = 0, widths: Widths | None = None) -> None:
        self.held = DataProto(make_columns(rows, length, widths or {}, self.rank))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def small(self, batch: DataProto) -> DataProto:
        return batch.select(["tokens"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self, rows: int) -> int:
        """Return the checksum of the first rows that this worker holds."""
        return int(checksum(self.held[:rows].batch.values()))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce(self, rows: DataProto) -> DataProto:
        return self.held[: len(rows)]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def consume(self, batch: DataProto) -> DataProto:
        return DataProto({"checksum": checksum(batch.batch.values())})


class TandemSide:
    """The methods that the benchmark calls on either side; verl's side has the same methods."""

    def __init__(self) -> None:
        self._groups: dict[str, WorkerGroup] = {}

    def start(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._backend = RayBackend("dispatch", device="cpu")

    def stop(self) -> None:
        self._groups.clear()
        self._backend.shutdown()

    def _group(self, name: str, processes: int, **init: Any) -> WorkerGroup:
        worker = partial(BenchWorker, **init)
        self._groups[name] = WorkerGroup(self._backend, worker, ResourcePool([processes], name))
        return self._groups[name]

    def open_calls(self, processes: int, rows: int, length: int) -> None:
        self._group("callees", processes)
        self._batch = DataProto(make_columns(rows, length, {"log_probs": 1}, 0))

    def calls(self, times: int) -> dict[str, float]:
        group = self._groups["callees"]
        small = seconds(lambda: group.small(self._batch), times)
        return {"nothing": seconds(group.nothing, times), "small": small}

    def open_move(self, producers: int, consumers: int, rows: int, length: int, widths: Widths) -> None:
        self._group("producers", producers, rows=rows // producers, length=length, widths=widths)
        self._group("consumers", consumers)

    def move(self, rows: int, reordered: bool) -> float:
        """Return the seconds from the call that produces the batch to the end of the call that reads it."""
        producer, consumer = self._groups["producers"], self._groups["consumers"]
        asked, order = DataProto({"row": torch.arange(rows)}), torch.randperm(rows)
        expected = sum(producer.checksum(rows // producer.world_size))
        seen: list[DataProto] = []

        def work() -> None:
            batch = producer.produce(asked)
            seen.append(consumer.consume(batch.rows(order) if reordered else batch))

        took = seconds(work)
        assert int(seen[0].dense("checksum").sum()) == expected
        return took

    def open_tables(self, rows: int, length: int, widths: Widths, parts: int) -> None:
        columns = make_columns(rows, length, widths, 0)
        self._table = DataProto(columns, {"uid": [str(row) for row in range(rows)]})
        self._parts = [part.clone() for part in self._table.chunk(parts)]
        names = list(columns)
        self._left, self._right = names[: len(names) // 2], names[len(names) // 2 :]
        self._order = torch.randperm(rows)

    def tables(self, times: int) -> dict[str, float]:
        """Return the median seconds of each operation."""
        table, left = self._table, self._table.select(self._left)
        right = self._table.select(self._right, [])
        return {
            "concat": seconds(lambda: DataProto.concat(self._parts), times),
            "chunk": seconds(lambda: table.chunk(len(self._parts)), times),
            "reorder": seconds(lambda: table.reorder(self._order), times),
            "union": seconds(lambda: left.union(right), times),
        }


class Comparison:
    """Both sides and their turns.

    Args:
        rounds: turns of each measurement.
        folder: the folder for the output of the sides.
        with_verl: whether verl takes part.
    """

    def __init__(self, rounds: int, folder: Path, *, with_verl: bool) -> None:
        self.rounds = rounds
        self.tandem = Side([sys.executable, __file__, "--tandem"], folder / "tandem.log")
        command = [str(VERL), str(HERE / "peers" / "verl_dispatch.py")]
        self.verl = Side(command, folder / "verl.log") if with_verl else None
        self.sides = [side for side in (self.tandem, self.verl) if side is not None]
        self.versions: dict[str, str] = {} if self.verl is None else self.verl.ask("versions")

    def both(self, method: str, **arguments: Any) -> None:
        for side in self.sides:
            side.ask(method, **arguments)

    def of_verl(self, method: str, **arguments: Any) -> list[Callable[[], Any]]:
        """Return the request to verl in a list; the list is empty if verl does not take part."""
        side = self.verl
        return [] if side is None else [lambda: side.ask(method, **arguments)]

    def turns(self, *questions: Callable[[], Any]) -> list[list[Any]]:
        """Ask each question in turn and return the answers, without the first round, which is a warm-up."""
        answers = [[question() for question in questions] for _ in range(self.rounds + 1)]
        return [list(column) for column in zip(*answers[1:], strict=True)]

    def close(self) -> None:
        for side in self.sides:
            side.close()


def compare_calls(sides: Comparison, workers: list[int]) -> list[dict[str, Any]]:
    rows = []
    for count in workers:
        sides.both("start", threads=CORES)
        sides.both("open_calls", processes=count, rows=64, length=32)
        own, *peers = sides.turns(
            lambda: sides.tandem.ask("calls", times=50),
            *sides.of_verl("calls", times=50, serialisation="torch"),
            *sides.of_verl("calls", times=50, serialisation="numpy"),
        )
        sides.both("stop")
        for what in ("nothing", "small"):
            name = f"{'a call that does nothing' if what == 'nothing' else 'a call with a small batch'}"
            own_s, *peer_s = (median(answer[what] for answer in way) for way in (own, *peers))
            rows.append(row(f"{name}, {count} worker(s)", own_s, peer_s))
    return rows


@dataclass
class Move:
    """One kind of move and the seconds that it took."""

    rows: int
    reordered: bool
    tandem_s: list[float] = field(default_factory=list)
    verl_s: dict[Way, list[float]] = field(default_factory=dict)
    first_try_s: dict[Way, float] = field(default_factory=dict)
    floor_s: list[float] = field(default_factory=list)

    def of_tandem(self, side: Side) -> float:
        return float(side.ask("move", rows=self.rows, reordered=self.reordered))

    def of_verl(self, side: Side, way: Way) -> float:
        asked = {"way": way[0], "serialisation": way[1]}
        return float(side.ask("move", rows=self.rows, reordered=self.reordered, **asked))

    def warm_up_verl(self, side: Side) -> None:
        """Warm up verl. The first time, try all its ways to find the fastest."""
        if self.verl_s:
            self.of_verl(side, list(self.verl_s)[-1])
            return
        able = [way for way in VERL_WAYS if way[0] != "future" or not self.reordered]
        self.first_try_s = {way: self.of_verl(side, way) for way in able}
        self.verl_s = {PLAIN_WAY: [], min(able, key=self.first_try_s.__getitem__): []}

    def report(self, length: int) -> dict[str, Any]:
        size = f"{self.rows * length * TOKEN_BYTES / 2**30:.2g} GiB"
        name = f"{size} from {PRODUCERS} to {CONSUMERS} workers{', reordered' * self.reordered}"
        verl_s = {way: median(taken) for way, taken in self.verl_s.items()}
        found = row(name, median(self.tandem_s), [verl_s[PLAIN_WAY], *verl_s.values()] if verl_s else [])
        found |= {"floor_s": min(self.floor_s), "share_of_floor": min(self.floor_s) / found["tandem_s"]}
        return found | {"verl_first_try_s": {", ".join(way): s for way, s in self.first_try_s.items()}}


def compare_moves(sides: Comparison, length: int) -> list[dict[str, Any]]:
    """Measure the moves.

    Each turn starts with a warm-up, then does two moves of each kind, and then stops Ray, because the batches
    of both sides together need too much memory.
    """
    opened = {"producers": PRODUCERS, "consumers": CONSUMERS, "rows": ROWS, "length": length, "widths": WIDE}
    moves = [Move(ROWS, reordered=False), Move(ROWS // 2, reordered=True)]
    for _ in range(max(1, sides.rounds - 1)):
        sides.tandem.ask("start", threads=CORES)
        sides.tandem.ask("open_move", **opened)
        for move in moves:
            move.tandem_s += [move.of_tandem(sides.tandem) for _ in range(3)][1:]
            move.floor_s.append(floor_s(move.rows * length * TOKEN_BYTES))
        sides.tandem.ask("stop")
        if sides.verl is None:
            continue
        sides.verl.ask("start", threads=CORES)
        sides.verl.ask("open_move", **opened)
        for move in moves:
            move.warm_up_verl(sides.verl)
            for way, taken in move.verl_s.items():
                taken += [move.of_verl(sides.verl, way) for _ in range(2)]
        sides.verl.ask("stop")
    return [move.report(length) for move in moves]


def compare_tables(sides: Comparison, rows: int, length: int) -> list[dict[str, Any]]:
    sides.both("start", threads=CORES)
    sides.both("open_tables", rows=rows, length=length, widths=COLUMNS, parts=4)
    own, *peers = sides.turns(lambda: sides.tandem.ask("tables", times=7), *sides.of_verl("tables", times=7))
    sides.both("stop")
    return [
        row(what, median(a[what] for a in own), [median(b[what] for b in of_peer) for of_peer in peers])
        for what in own[0]
    ]


def floor_s(size: int) -> float:
    """Return the seconds to copy `size` bytes to used shared memory and to read them, on all cores."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as shared, ThreadPoolExecutor(CORES) as pool:
            target = np.array_split(np.frombuffer(shared, np.int32), CORES)
            source = [np.ones_like(part) for part in target]
            for _ in range(2):
                began = time.perf_counter()
                list(pool.map(np.copyto, target, source))
                list(pool.map(np.sum, target))
                took = time.perf_counter() - began
            del target
    return took


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def row(what: str, tandem_s: float, verl_s: Sequence[float]) -> dict[str, Any]:
    """Print and return one row of the table.

    Args:
        what: the name of the row.
        tandem_s: Tandem's seconds.
        verl_s: the seconds of verl's ways, with the default way first; empty without verl.
    """
    found: dict[str, Any] = {"what": what, "tandem_s": tandem_s}
    told = f"{what:<42} {tandem_s * 1e3:>12.3f}"
    if verl_s:
        plain, best = verl_s[0], min(verl_s)
        found |= {"verl_s": plain, "ratio": plain / tandem_s}
        found |= {"verl_fastest_s": best, "ratio_to_fastest": best / tandem_s}
        told += f" {plain * 1e3:>12.3f} {found['ratio']:>7.2f}"
        told += f" {best * 1e3:>12.3f} {found['ratio_to_fastest']:>7.2f}"
    print(told, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="move a quarter of the bytes, with fewer workers and turns"
    )
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    parser.add_argument("--tandem", action="store_true", help=argparse.SUPPRESS)
    args = arguments(parser, quick=True)
    if args.tandem:
        side = TandemSide()
        serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_")})
        return
    with_verl = peer("verl", tiny=args.tiny)
    length = 16 if args.tiny else 512 if args.quick else 2048
    print(f"{'':<42} {'Tandem ms':>12} {'verl ms':>12} {'ratio':>7} {'fastest':>12} {'ratio':>7}")
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Comparison(1 if args.quick else 3, Path(folder), with_verl=with_verl)) as sides,
    ):
        rows = compare_tables(sides, *((64, 32) if args.tiny else (4096, 2048)))
        rows += compare_calls(sides, [1] if args.tiny else [1, 4] if args.quick else [1, 4, 8])
        rows += compare_moves(sides, length)
        versions = sides.versions
    if args.out:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.processor() or platform.machine()}, {CORES} cores",
            "versions": {"python": platform.python_version(), "torch": torch.__version__}
            | {"ray": ray.__version__}
            | versions,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
