"""Measure the time from a file of a million rows to the first training batch.

Tandem checks, formats, tokenises, filters and shuffles the rows. The peer, `datasets`, does the same without
the checks, with as many processes.

    python benchmarks/data_rows.py --out benchmarks/results/data_rows.json

Each measurement runs in its own process, first cold (empty cache), then warm, and the two sides take turns.
The seconds count from the end of the imports to the first batch. The memory is the peak over all processes
(PSS, which counts a shared page once). `ratio` is Tandem's time divided by the time of `datasets`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tiny import arguments

LIMIT, BATCH, SEED = 64, 1024, 1
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(folder: Path, rows: int) -> None:
    """Write problems of 8 to 60 words, a fifth over the limit, and a tokenizer trained on such text."""
    tokenizers = __import__("tokenizers")
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioubcdfglmnprst", k=draw.randint(2, 9))) for _ in range(2000)]

    def text() -> str:
        return f"{' '.join(draw.choices(words, k=draw.randint(8, 60)))} {draw.randint(1, 9999)}?"

    def row(number: int) -> dict[str, Any]:
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": text()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "split": "train"},
        }

    schema = pa.Table.from_pylist([row(0)]).schema
    with pq.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for start in range(0, rows, 50_000):
            part = [row(number) for number in range(start, min(rows, start + 50_000))]
            writer.write_table(pa.Table.from_pylist(part, schema))
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    raw.train_from_iterator((text() for _ in range(min(rows, 20_000))), trainer)
    fast = __import__("transformers").PreTrainedTokenizerFast
    fast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE).save_pretrained(folder)


def tandem(folder: Path, cache: Path, workers: int) -> dict[str, Any]:
    from tandem.data.loader import BatchLoader  # noqa: PLC0415
    from tandem.data.mixture import EpochOrder  # noqa: PLC0415
    from tandem.data.prompts import PromptDataset  # noqa: PLC0415

    __import__("pandas")  # `datasets` imports pandas too; pyarrow imports it at the first conversion
    tokenizer = tokenizer_of(folder)
    began = time.monotonic()
    dataset = PromptDataset(
        str(folder / "rows.parquet"),
        tokenizer,
        max_prompt_length=LIMIT,
        filter_overlong_prompts=True,
        workers=workers,
        cache_dir=str(cache),
    )
    batch = BatchLoader(dataset, BATCH, EpochOrder(shuffle=True, seed=SEED)).next()
    tokens = int(batch.ragged("prompts").lengths.sum())
    return {"seconds": time.monotonic() - began, "kept": len(dataset), "tokens": tokens}


def plain_datasets(folder: Path, cache: Path, workers: int) -> dict[str, Any]:
    datasets = __import__("datasets")
    tokenizer = tokenizer_of(folder)

    def encode(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = tokenizer.apply_chat_template(rows["prompt"], tokenize=False, add_generation_prompt=True)
        return {
            "input_ids": tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        }

    began = time.monotonic()
    rows = datasets.load_dataset(
        "parquet", data_files=str(folder / "rows.parquet"), cache_dir=str(cache), split="train"
    )
    rows = rows.map(encode, batched=True, num_proc=workers)
    rows = rows.filter(
        lambda part: [len(ids) <= LIMIT for ids in part],
        input_columns="input_ids",
        batched=True,
        num_proc=workers,
    )
    order = np.random.Generator(np.random.PCG64([SEED, 0])).permutation(len(rows))
    batch = rows[order[:BATCH].tolist()]
    tokens = sum(map(len, batch["input_ids"]))
    return {"seconds": time.monotonic() - began, "kept": len(rows), "tokens": tokens}


WAYS = {"tandem": tandem, "datasets": plain_datasets}


def tokenizer_of(folder: Path) -> Any:
    return __import__("transformers").AutoTokenizer.from_pretrained(folder)


def measured(way: str, folder: Path, cache: Path, workers: int) -> dict[str, Any]:
    """Run one side in a process, and sample its memory twice a second for the peak."""
    words = [
        sys.executable,
        __file__,
        "--way",
        way,
        "--folder",
        folder,
        "--cache",
        cache,
        "--workers",
        workers,
    ]
    peak = 0.0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=log)
        while process.poll() is None:
            peak = max(peak, held(process.pid))
            time.sleep(0.5)
        assert process.stdout is not None
        if process.returncode:
            log.seek(0)
            raise SystemExit(log.read().decode()[-4000:])
        found = json.loads(process.stdout.read().splitlines()[-1])
    return {**found, "peak_gib": peak / 2**30, "load": os.getloadavg()[0]}


def held(pid: int) -> float:
    """Return the bytes that a process and its children use (PSS)."""
    total = 0.0
    try:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    except (psutil.NoSuchProcess, OSError):  # a process has just ended
        return 0.0
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help="measure only this side, in this process")
    parser.add_argument(
        "--folder", type=Path, help="the folder of the rows; they are written if they do not exist"
    )
    parser.add_argument("--cache", type=Path)
    given = arguments(parser, rows=2000, workers=1)
    if given.way:
        print(json.dumps(WAYS[given.way](given.folder, given.cache, given.workers)))
        return
    ways = list(WAYS)
    if given.tiny and not find_spec("datasets"):
        print("datasets: skipped because it is not installed")
        ways.remove("datasets")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        if not (folder / "tokenizer.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write(folder, given.rows)
        found: dict[str, list[dict[str, Any]]] = {}
        for repeat in range(given.repeats):
            for way in ways:
                for state in ("cold", "warm"):
                    cache = Path(scratch, f"cache-{way}")
                    result = measured(way, folder, cache, given.workers)
                    found.setdefault(f"{way} {state}", []).append(result)
                    print(repeat, way, state, result, file=sys.stderr, flush=True)
                shutil.rmtree(cache, ignore_errors=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    facts = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors",
        "versions": {name: __import__(name).__version__ for name in (*ways[1:], "pyarrow", "tokenizers")},
        "rows": given.rows,
        "workers": given.workers,
        "repeats": given.repeats,
        "medians": medians,
        "ratio": {
            state: medians[f"tandem {state}"]["seconds"] / medians[f"datasets {state}"]["seconds"]
            for state in ("cold", "warm")
            if "datasets" in ways
        },
    }
    print(json.dumps(facts, indent=2))
    if given.out:
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
