"""`tandem train [CONFIG.yaml] key=value …`"""

from __future__ import annotations

import sys
from importlib import import_module

from tandem.config.load import load_train_config, to_yaml
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments

USAGE = """usage: tandem train [CONFIG.yaml] key=value … [--dry-run]

Trains a policy by reinforcement. Keys are those of `tandem config show`; values are YAML.
  --dry-run   print the resolved config and the sizes that follow from it, and stop"""


def train(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    path, overrides = split_arguments([word for word in arguments if word != "--dry-run"])
    loaded = load_train_config(path, overrides)
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    if "--dry-run" in arguments:
        print(to_yaml(loaded.config))
        for name, value in derived(loaded.config).items():
            print(f"# {name}: {value}")
        return 0
    build_ppo = import_module("tandem.trainer.build").build_ppo
    trainer = build_ppo(loaded.config, say=lambda sentence: print(sentence, flush=True))
    trainer.fit()
    return 130 if trainer.session.interrupted else 0
