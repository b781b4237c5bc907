"""Times the start of a program in the sandbox, against the start of Python alone, by turns.

    python benchmarks/sandbox.py --runs 100

Prints one JSON line. A run's cost is processor time, of this process and of all that it started, which other
work on the machine changes less than the clock; `per_core_second`: runs in a second of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

from tandem.sandbox import Limits, local, protection


def spent() -> float:
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args().runs
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", "print(1)"]
    ways: dict[str, Callable[[], object]] = {
        "python": lambda: subprocess.run(python, capture_output=True, check=True),
        "sandbox": lambda: local.run("print(1)", "", Limits()),
    }
    costs, clocks = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    held = protection()
    for _ in range(runs):
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
