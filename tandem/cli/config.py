"""`tandem config show [CONFIG.yaml] key=value …` and `tandem config explain KEY …`"""

from __future__ import annotations

import sys

from tandem.config.explain import explain, overview
from tandem.config.load import load_sft_config, load_train_config, to_yaml
from tandem.config.sources import split_arguments
from tandem.errors import ConfigError

USAGE = """usage: tandem config show [CONFIG.yaml] key=value … [--sft]
       tandem config explain KEY …

show      prints the resolved config as YAML, every key; without arguments, all keys and their defaults
explain   prints a key's type, default, meaning and what reads it; for a section, its keys
  --sft   a config of `tandem sft`, not of `tandem train`"""


def config(arguments: list[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE)
        case ["show", *rest]:
            _show([word for word in rest if word != "--sft"], sft="--sft" in rest)
        case ["explain", name, *more]:
            print("\n\n".join(explain(key) for key in (name, *more)))
        case _:
            raise ConfigError("unknown use", got=" ".join(arguments), expected=USAGE)
    return 0


def _show(words: list[str], *, sft: bool) -> None:
    if not words:
        print(overview("tandem sft" if sft else "tandem train"))
        return
    path, overrides = split_arguments(words)
    loaded = load_sft_config(path, overrides) if sft else load_train_config(path, overrides)
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    print(to_yaml(loaded.config), end="")
