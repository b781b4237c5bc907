"""Measure the reward pool with scores of which 5 % hang, 5 % kill their process and 1 % leak memory.

    python benchmarks/reward_pool.py --scores 2000 --workers 4 --limit 0.5 --work 0.01

The program prints one line of JSON. `ratio` is the time divided by (work + hangs x limit) / workers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from tiny import arguments

from tandem.config.rewards import RewardConfig
from tandem.rewards import Item
from tandem.rewards.custom import load_custom
from tandem.rewards.pool import Pool

SOURCE = """
import os, signal, time
kept = []
def compute_score(data_source, solution_str, ground_truth, extra_info=None, work=0.0):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "leak":
        kept.append(bytearray(b"x") * (256 << 20))
    time.sleep(work)
    return 1.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scores", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=0.5)
    parser.add_argument("--work", type=float, default=0.01)
    given = arguments(parser, scores=40, workers=2, limit=0.3, work=0.0)
    n = given.scores
    kinds = ["hang"] * (n // 20) + ["crash"] * (n // 20) + ["leak"] * (n // 100)
    kinds += ["ok"] * (n - len(kinds))
    random.Random(0).shuffle(kinds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "own.py")
        file.write_text(SOURCE)
        reward = load_custom(str(file), kwargs={"work": given.work})
        config = RewardConfig(
            num_workers=given.workers, timeout=given.limit, max_growth_mb=128, on_error="zero"
        )
        pool = Pool(reward, config, Path(folder, "rewards.log"))
        pool.score([Item("any", "ok", None)] * given.workers)
        began = time.monotonic()
        scored = pool.score([Item("any", kind, None, index=row) for row, kind in enumerate(kinds)])
        seconds = time.monotonic() - began
        pool.close()
    ideal = ((n - kinds.count("hang")) * given.work + kinds.count("hang") * given.limit) / given.workers
    wrong = sum(s.score != (kind in ("ok", "leak")) for s, kind in zip(scored, kinds, strict=True))
    left = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
            left += [] if "forkserver" in "".join(child.cmdline()) else [child]
    alive = [p.pid for p in psutil.Process().children(recursive=True)]
    facts = {"seconds": seconds, "ideal": ideal, "ratio": seconds / ideal, "wrong": wrong}
    print(
        json.dumps({**vars(given), **facts, "counts": pool.counts, "left": len(left), "children": len(alive)})
    )


if __name__ == "__main__":
    main()
