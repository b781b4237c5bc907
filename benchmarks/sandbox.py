"""Times the start of a program in the sandbox, against the start of Python alone, by turns.

    python benchmarks/sandbox.py --runs 100

Prints one JSON line. A run's cost is processor time, of this process and of all that it started, which other
work on the machine changes less than the clock; `per_core_second`: runs in a second of it. Each turn is of 25
runs, and what sandlock has waiting for them starts and ends within it. Of bubblewrap's processes the system
counts but the first."""

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
    """Ends what waits for runs."""
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
