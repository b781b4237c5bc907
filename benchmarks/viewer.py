"""Measure the page of `tandem view` in Chromium, for a run with many steps and samples.

    python benchmarks/viewer.py --steps 1000 --samples 1000 [--folder DIR]

The program writes a run folder with a few tokens per sample, and prints one line of JSON. It has the seconds
until the index contains all samples, and milliseconds (medians of five): from opening the page to its first
paint and to its first chart, from a change of a filter to the new list, and from the last key of a search to
its list, including the 150 ms in which the page waits for a further key. If duckdb is installed, it answers
the same filter and search over the same files, after it has read them into memory, as the index does.
`over_duckdb` is the server's time divided by duckdb's time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Page, sync_playwright
from tiny import arguments

from tandem.viewer.api import Api
from tandem.viewer.query import Query
from tandem.viewer.server import Server
from tandem.viewer.shelf import Shelf

GROUP, PROMPT_TOKENS, LONGEST = 8, 6, 12
NAMES = ("reward/mean", "actor/kl", "actor/entropy", "actor/clip_fraction", "actor/grad_norm", "timing/step")
FILTER, WORDS = "0.5", ("mulberry", "quince", "medlar", "damson", "loquat")
ROUNDS = 5


def write_run(folder: Path, steps: int, samples: int, *, first: int = 1) -> None:
    """Write a run folder with a file of samples for each step, with the columns that training writes."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    (folder / "log").mkdir(exist_ok=True)
    rng = np.random.default_rng(first)
    words = np.array([*WORDS, *(f"w{number:x}" for number in range(5000))])
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, first + steps):
            values = {name: float(rng.random()) for name in NAMES}
            others = {f"perf/other_{number}": float(rng.random()) for number in range(60)}
            file.write(json.dumps({"step": step, **values, **others}) + "\n")
            table = _samples(rng, words, step, samples)
            pq.write_table(table, folder / "samples" / f"step_{step:06d}.parquet")


def _samples(rng: np.random.Generator, words: np.ndarray, step: int, count: int) -> pa.Table:
    lengths = rng.integers(1, LONGEST + 1, count) + PROMPT_TOKENS
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    within = np.arange(total) - np.repeat(offsets[:-1], lengths)
    groups = np.arange(count) // GROUP

    def ragged(values: np.ndarray) -> pa.Array:
        return pa.LargeListArray.from_arrays(offsets, pa.array(values))

    log_probs = -rng.random(total, np.float32)
    prompts = [[{"role": "user", "content": f"question {step % 50} {group}"}] for group in groups]
    return pa.table(
        {
            "tokens": ragged(rng.integers(0, 50_000, total)),
            "response_mask": ragged(within >= PROMPT_TOKENS),
            "rollout_log_probs": ragged(log_probs),
            "old_log_probs": ragged(log_probs + 0.001 * rng.standard_normal(total).astype(np.float32)),
            "advantages": ragged(rng.standard_normal(total).astype(np.float32)),
            "scores": rng.random(count).astype(np.float32),
            "uid": [f"{step}-{group}" for group in groups],
            "data_source": [f"source {group % 3}" for group in groups],
            "messages": prompts,
            "finish_reason": np.where(rng.random(count) < 0.9, "stop", "length"),
            "response_text": [" ".join(row) for row in rng.choice(words, (count, 12))],
        }
    )


def listed(page: Page, act: str) -> float:
    """Return the milliseconds from an action in the page to the resulting list."""
    took: float = page.evaluate(
        """async (act) => {
          const said = () => document.querySelector(".summary")?.textContent;
          const before = said(), began = performance.now();
          new Function("type", act)((label, value) => {
            const input = document.querySelector(`[aria-label="${label}"]`);
            input.value = value;
            for (const kind of ["input", "change"]) input.dispatchEvent(new Event(kind, { bubbles: true }));
          });
          while (said() === before || document.querySelector('.listed[aria-busy="true"]')) {
            if (performance.now() - began > 30000) throw new Error(`the list did not change: ${before}`);
            await new Promise(requestAnimationFrame);
          }
          return performance.now() - began;
        }""",
        act,
    )
    return took


def painted(page: Page, url: str) -> tuple[float, float]:
    """Return the milliseconds to the first paint and until all charts are drawn."""
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector(".chart canvas")
    drawn: float = page.evaluate("performance.now()")
    first: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return first, drawn


def timed(action: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        action()
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken)


def in_page(server: Server, name: str) -> dict[str, float]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900}, bypass_csp=True)
        paints = [painted(page, f"{server.url}#/overview?run={name}") for _ in range(ROUNDS)]
        page.goto("about:blank")
        page.goto(f"{server.url}#/samples?run={name}")
        page.wait_for_selector(".summary")
        filters = []
        for _ in range(ROUNDS):
            filters.append(listed(page, f'type("Lowest score", "{FILTER}")'))
            listed(page, 'type("Lowest score", "")')
        searches = [listed(page, f'type("Text in prompt or response", "{word}")') for word in WORDS]
        browser.close()
    return {
        "first_paint_ms": median(first for first, _ in paints),
        "charts_ms": median(drawn for _, drawn in paints),
        "filter_ms": median(filters),
        "search_ms": median(searches),
    }


def in_server(api: Api, name: str) -> dict[str, float]:
    """Measure the same filter and searches without a browser."""
    words = iter(WORDS)
    return {
        "filter_ms": timed(lambda: api.routes["samples"](Query(f"run={name}&score={FILTER}.."))),
        "search_ms": timed(lambda: api.routes["samples"](Query(f"run={name}&text={next(words)}"))),
    }


def in_duckdb(folder: Path) -> dict[str, float]:
    """Measure the same in duckdb, which also counts the histograms of score, length and step."""
    base = import_module("duckdb").connect(config={"threads": os.cpu_count()})
    base.execute(
        "create table s as select filename, scores as score, uid, finish_reason, data_source, response_text, "
        "messages[1].content as prompt, len(list_filter(response_mask, lambda x: x)) as length "
        f"from read_parquet('{folder}/samples/*.parquet', filename=true)"
    )

    def ask(where: str) -> None:
        base.execute(
            f"select filename, score, prompt, response_text from s where {where} limit 50"
        ).fetchall()
        for column in ("floor(score * 40)", "length", "filename"):
            base.execute(f"select {column}, count(*) from s where {where} group by 1").fetchall()

    words = iter(WORDS)
    return {
        "filter_ms": timed(lambda: ask(f"score >= {FILTER}")),
        "search_ms": timed(
            lambda: ask(
                "contains(lower(response_text), '{0}') or contains(lower(prompt), '{0}')".format(next(words))
            )
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument(
        "--folder",
        type=Path,
        help="the run folder, written if it does not exist; default: a temporary folder",
    )
    asked = arguments(parser, steps=4, samples=2000)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary) / "run"
        if not (folder / "metrics.jsonl").exists():
            write_run(folder, asked.steps, asked.samples)
        print(json.dumps(measured(folder, asked.steps, asked.samples)))


def measured(folder: Path, steps: int, samples: int) -> dict[str, Any]:
    began = time.perf_counter()
    with Shelf([folder]) as shelf:
        api = Api(shelf)
        index = shelf.get(str(folder)).samples
        while len(index.parts) < steps:
            time.sleep(0.05)
        indexed = time.perf_counter() - began
        with Server(api) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            page = in_page(server, str(folder))
            server.shutdown()
        own = in_server(api, str(folder))
    facts: dict[str, Any] = {
        "steps": steps,
        "samples": steps * samples,
        "index_s": indexed,
        "page": page,
        "server": own,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "pyarrow": pa.__version__},
        "load": os.getloadavg()[0],
    }
    if find_spec("duckdb"):
        peer = in_duckdb(folder)
        facts |= {"duckdb": peer, "over_duckdb": {name: own[name] / peer[name] for name in own}}
    return facts


if __name__ == "__main__":
    main()
