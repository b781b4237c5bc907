"""Call verl's own reward functions, in verl's environment (`make peers`).

    .peers/verl/bin/python benchmarks/peers/verl_rewards.py IN.json OUT.json

IN.json has a list of [data_source, solution_str, ground_truth]. OUT.json gets a score for each entry, or null
if verl needs a package that it does not install itself. The data source "gsm8k, flexible" means GSM8K's
flexible method.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from verl.utils.reward_score import default_compute_score, gsm8k


def score(source: str, response: str, truth: Any) -> float | None:
    try:
        if source == "gsm8k, flexible":
            return float(gsm8k.compute_score(response, truth, method="flexible"))
        found = default_compute_score(source, response, truth)
    except ImportError:
        return None
    return float(found["score"] if isinstance(found, dict) else found)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with redirect_stdout(sys.stderr):
        scores = [score(*case) for case in given]
    Path(sys.argv[2]).write_text(json.dumps(scores), encoding="utf-8")
