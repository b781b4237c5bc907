"""`tandem train [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from importlib import import_module

from tandem.cli.here import lacking, refuse, train_rows
from tandem.config.load import load_train_config, to_dict
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments, to_yaml
from tandem.observability.terminal import say, warn

USAGE = """usage: tandem train [CONFIG.yaml] key=value … [--dry-run]

Trains a policy by reinforcement. Keys are those of `tandem config show`; values are YAML.
  --dry-run   print the resolved config and the sizes that follow from it, and stop
Ctrl-C or SIGTERM ends it after the step at hand, saved, with exit status 130; a second one at once."""


def train(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    path, overrides = split_arguments([word for word in arguments if word != "--dry-run"])
    loaded = load_train_config(path, overrides)
    for notice in loaded.notices:
        warn(f"note: {notice}")
    if "--dry-run" in arguments:
        print(to_yaml(to_dict(loaded.config)))
        for name, value in derived(loaded.config, train_rows=train_rows(loaded.config)).items():
            print(f"# {name}: {value}")
        return 0
    refuse(lacking(loaded.config))
    run_ppo = import_module("tandem.trainer.run").run_ppo
    interrupted = run_ppo(loaded.config, say=say)
    return 130 if interrupted else 0
