"""Compare the start of a program in the sandbox with the start of Python alone, in turns.

    python benchmarks/sandbox.py --runs 100

The program prints one line of JSON. The cost of a run is processor time, of this process and of all processes
that it started, because other load on the machine changes it less than wall-clock time. `per_core_second` is
the number of runs in a second of processor time. Each turn has 25 runs. Processes that sandlock keeps waiting
for the next run start and end within the turn. For bubblewrap, the system counts only the first of its
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

from tiny import arguments

from tandem.sandbox import Limits, local, protection
from tandem.sandbox.protections import Sandlock, idle_sandboxes

TURN = 25


def spent() -> float:
    return sum(os.times()[:4])


def end() -> None:
    """End the sandbox processes that wait for a run."""
    for kept in idle_sandboxes(Sandlock, os.getpid()):
        kept.close()
    idle_sandboxes(Sandlock, os.getpid()).clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    runs = arguments(parser, runs=1).runs
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", "print(1)"]

    def sandboxed() -> None:
        for _ in range(TURN):
            assert local.run("print(1)", "", Limits()).stdout == "1\n"
        end()

    def alone() -> None:
        for _ in range(TURN):
            subprocess.run(python, capture_output=True, check=True)

    ways: dict[str, Callable[[], object]] = {"python": alone, "sandbox": sandboxed}
    costs, clocks = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    held = protection()
    end()
    runs = -(-runs // TURN) * TURN
    for _ in range(runs // TURN):
        for name, way in ways.items():
            cost, clock = spent(), time.perf_counter()
            way()
            costs[name] += spent() - cost
            clocks[name] += time.perf_counter() - clock
    facts = {
        name: {
            "cpu_ms": costs[name] / runs * 1e3,
            "per_core_second": runs / costs[name],
            "ms": clocks[name] / runs * 1e3,
        }
        for name in ways
    }
    machine = {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()}
    load = os.getloadavg()[0]
    ratio = costs["sandbox"] / costs["python"]
    print(
        json.dumps(
            {
                "protection": held,
                "runs": runs,
                "ratio": ratio,
                **{f"of_{k}": v for k, v in facts.items()},
                "machine": machine,
                "load": load,
            }
        )
    )


if __name__ == "__main__":
    main()
