"""`tandem generate [CONFIG.yaml] key=value …`"""

from __future__ import annotations

import sys
from importlib import import_module

from tandem.config.load import load_generate_config, to_yaml
from tandem.config.sources import split_arguments

USAGE = """usage: tandem generate [CONFIG.yaml] key=value … [--overwrite] [--dry-run]

Answers a file of prompts: data.path=IN model.path=MODEL data.output_path=OUT rollout.n=4 …
OUT (.parquet or .jsonl) has the columns of IN and, as lists with one entry per sample: responses,
response_ids, response_log_probs, finish_reasons. Killed at any moment, the same command goes on from what was
finished. `tandem config explain rollout` lists the keys.
  --overwrite   replace OUT, and drop unfinished work
  --dry-run     print the resolved config and stop"""


def generate(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    path, overrides = split_arguments(
        [word for word in arguments if word not in ("--overwrite", "--dry-run")]
    )
    loaded = load_generate_config(path, overrides)
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    if "--dry-run" in arguments:
        print(to_yaml(loaded.config))
        return 0
    generate_file = import_module("tandem.trainer.offline").generate_file
    output = generate_file(
        loaded.config,
        overwrite="--overwrite" in arguments,
        say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    print(f"wrote {output}")
    return 0
