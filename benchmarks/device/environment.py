"""Report the machine and the installed packages, and run the tests that need a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device.processes import ROOT, run_command, run_forked
from benchmarks.device.report import Row, Setting, short

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pydantic",
    "ray",
    "vllm",
    "liger-kernel",
    "peft",
    "scipy",
)
TEST_LIMIT_S = 240.0
# processes for the tests: most of their time is host time, and a device error ends only one process
PROCESSES = 4
QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,persistence_mode"


def rows(setting: Setting) -> list[Row]:
    return [
        Row("GPU tests that pass", gpu_tests, 60 if setting.device.type == "cuda" else 1, "tests"),
        Row("kernels are compiled, not interpreted", compiled, 1, "yes"),
    ]


def about(device: torch.device) -> dict[str, Any]:
    """Return the facts about the machine: versions, memory and clocks."""
    told: dict[str, Any] = {
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernel": platform.release(),
        "device": platform.processor() or platform.machine(),
    }
    if device.type != "cuda":
        return told
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return told | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": nvidia_smi(),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi() -> str:
    """Return driver and clocks, as far as nvidia-smi can read them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi"
    words = [program, f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def compiled(setting: Setting) -> dict[str, Any]:
    """Check that Triton compiles kernels and does not interpret them."""
    asked = os.environ.get("TRITON_INTERPRET")
    if setting.device.type == "cuda" and asked is not None:
        raise RuntimeError(f"TRITON_INTERPRET={asked} is set; unset it so that Triton compiles its kernels")
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia*"))
    return {"value": int(asked is None), "TRITON_INTERPRET": asked, "device_nodes": nodes}


def test_files() -> list[str]:
    """Return the test files with GPU tests; importing the other files would take a minute."""
    tests = ROOT / "tests"
    mark = "mark." + "gpu"
    found = [path for path in tests.rglob("test_*.py") if mark in path.read_text(encoding="utf-8")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def gpu_tests(setting: Setting) -> dict[str, Any]:
    """Run `pytest -m gpu` in a separate process.

    The value is the number of tests that pass. The row also has the text of each failure.
    """
    files = ["tests/test_device.py"] if setting.tiny else test_files()
    limit = min(TEST_LIMIT_S, max(setting.left_s - 5, 5))
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        words = [
            "-v",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            f"--junitxml={results}",
            "--timeout=120",
            *(("-n", str(PROCESSES)) if setting.device.type == "cuda" else ()),
            *files,
        ]
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            if setting.forks:
                run_forked(lambda: sys.exit(pytest.main(words)), limit, stdout=said, stderr=said)
            else:
                run_command([sys.executable, "-m", "pytest", *words], limit, stdout=said, stderr=said)
            said.seek(0)
            output = said.read()
        cases = cases_of(results) or cases_told(output)
    counts = {
        kind: sum(case["outcome"] == kind for case in cases) for kind in ("passed", "failed", "skipped")
    }
    failures = [case for case in cases if case["outcome"] == "failed"]
    told: dict[str, Any] = {"value": counts["passed"], **counts, "failures": failures, "files": files}
    if not cases or (setting.device.type == "cuda" and counts["skipped"]):
        told["output"] = short(output)
    print(short(output, 20000), file=sys.stderr)
    return told


def cases_of(results: Path) -> list[dict[str, str]]:
    """Return name, outcome and text of each test in pytest's results file; passed tests have no text."""
    if not results.exists():
        return []
    found = []
    for case in ElementTree.parse(results).iter("testcase"):
        outcome, text = "passed", ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if part.tag == "skipped" else "failed"
                text = short(f"{part.get('message') or ''}\n{part.text or ''}", 2000)
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append({"name": name, "outcome": outcome, "text": text})
    return found


def cases_told(output: str) -> list[dict[str, str]]:
    """Return the same from pytest's output, for the tests that finished before pytest was ended."""
    outcomes = {"PASSED": "passed", "SKIPPED": "skipped", "FAILED": "failed", "ERROR": "failed"}
    words = "|".join(outcomes)
    told = re.findall(rf"^(\S+::.*?) ({words})\b", output, re.MULTILINE)
    # the format of pytest-xdist
    reported = re.findall(rf"^\[gw\d+\].*? ({words}) (\S+::.*)$", output, re.MULTILINE)
    told += [(name, word) for word, name in reported]
    return [{"name": name, "outcome": outcomes[outcome], "text": ""} for name, outcome in told]
