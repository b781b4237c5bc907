"""Programs run on a server that speaks SandboxFusion's protocol (https://bytedance.github.io/SandboxFusion):
one POST for each, to run_code."""

from __future__ import annotations

import time
from typing import Any

import httpx2

from tandem.errors import RewardError
from tandem.sandbox.local import OUTPUT_BYTES, Run, Status
from tandem.sandbox.protections import Limits

TRIES = 4
PAUSE_SECONDS = 0.5  # after the first failure; twice as long after each further one
OVERHEAD_SECONDS = 10.0  # what an answer may take beside the program's own time
BUSY = (429, 502, 503, 504)


def run(program: str, stdin: str, limits: Limits, url: str) -> Run:
    """Runs a Python program on a server.

    Args:
        url: the server's, or of its run_code.

    Raises:
        RewardError: it cannot be reached, is busy, or answers something else, at four tries.
    """
    address = url if url.rstrip("/").endswith("run_code") else f"{url.rstrip('/')}/run_code"
    asked = {
        "code": program,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_mb,
        "files": {},
        "fetch_files": [],
    }
    problem: Any = None
    for failed in range(TRIES):
        if failed:
            time.sleep(PAUSE_SECONDS * 2 ** (failed - 1))
        try:
            answer = httpx2.post(address, json=asked, timeout=2 * limits.seconds + OVERHEAD_SECONDS)
            if answer.status_code == 200 and (found := _read(answer.json())):
                return found
            problem = f"status {answer.status_code}: {answer.text[:200]}"
            if answer.status_code not in (200, *BUSY):
                break
        except (httpx2.TransportError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
    raise RewardError(
        "the sandbox server gives no answer",
        field="reward.sandbox.url",
        got=f"{problem}, from {address}",
        expected="the answer of SandboxFusion's run_code",
        remedy="look whether the server runs, and whether reward.sandbox.max_concurrent is what it can bear",
    )


def _read(answer: Any) -> Run | None:
    """What a program did, as the server says; None where the server failed."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        return None
    ran = answer.get("run_result") or {}
    finished = answer["status"] == "Success" and ran.get("return_code") == 0
    status: Status = "finished" if finished else "error"
    if ran.get("status") == "TimeLimitExceeded":
        status = "timeout"
    stdout = str(ran.get("stdout") or "")
    return Run("output" if len(stdout) > OUTPUT_BYTES else status, stdout, str(ran.get("stderr") or ""))
