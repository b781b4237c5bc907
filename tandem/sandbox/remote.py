"""Run programs on a server with SandboxFusion's protocol.

See https://bytedance.github.io/SandboxFusion. Each program is one POST request to run_code.
"""

from __future__ import annotations

import time
from typing import Any

import httpx2

from tandem.errors import RewardError
from tandem.sandbox.local import OUTPUT_BYTES, Run, Status
from tandem.sandbox.protections import Limits

TRIES = 4
PAUSE_SECONDS = 0.5  # pause after the first failure; doubled after each further failure
OVERHEAD_SECONDS = 10.0  # time that an answer may take in addition to the program's own time
BUSY = (429, 502, 503, 504)


def run(program: str, stdin: str, limits: Limits, url: str) -> Run:
    """Run a Python program on a server.

    Args:
        program: source code of the program.
        stdin: standard input of the program.
        limits: limits of the program.
        url: URL of the server, or of its endpoint run_code.

    Raises:
        RewardError: after four tries, the server could not be reached, was busy or gave an invalid answer. A
            status other than "busy" is not retried.
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
        "the sandbox server does not give a valid answer",
        field="reward.sandbox.url",
        got=f"{problem}, from {address}",
        expected="the answer of SandboxFusion's run_code",
        remedy="check that the server runs; if it is overloaded, lower reward.sandbox.max_concurrent",
    )


def _read(answer: Any) -> Run | None:
    """Return the result of the program from the server's answer; None if the server itself failed."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        return None
    ran = answer.get("run_result") or {}
    finished = answer["status"] == "Success" and ran.get("return_code") == 0
    status: Status = "finished" if finished else "error"
    if ran.get("status") == "TimeLimitExceeded":
        status = "timeout"
    stdout = str(ran.get("stdout") or "")
    return Run("output" if len(stdout) > OUTPUT_BYTES else status, stdout, str(ran.get("stderr") or ""))
