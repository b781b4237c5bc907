"""`tandem sft [CONFIG.yaml] key=value …`"""

from __future__ import annotations

import sys
from importlib import import_module

from tandem.config.load import load_sft_config, to_yaml
from tandem.config.sources import split_arguments

USAGE = """usage: tandem sft [CONFIG.yaml] key=value … [--dry-run]

Fine-tunes a model on demonstrations: a column of messages, or of prompts and responses.
  --dry-run   print the resolved config and stop"""


def sft(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    path, overrides = split_arguments([word for word in arguments if word != "--dry-run"])
    loaded = load_sft_config(path, overrides)
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    if "--dry-run" in arguments:
        print(to_yaml(loaded.config))
        return 0
    build_sft = import_module("tandem.trainer.sft").build_sft
    trainer = build_sft(loaded.config, say=lambda sentence: print(sentence, flush=True))
    trainer.fit()
    return 130 if trainer.session.interrupted else 0
