"""`tandem check [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from tandem.config.load import load_sft_config, load_train_config
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments

USAGE = """usage: tandem check [CONFIG.yaml] key=value … [--sft]

Says everything that is wrong with a config, without touching a device.
  --sft   a config of `tandem sft`, not of `tandem train`"""


def check(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    path, overrides = split_arguments([word for word in arguments if word != "--sft"])
    sizes: dict[str, int | str] = {}
    if "--sft" in arguments:
        notices = load_sft_config(path, overrides).notices
    else:
        loaded = load_train_config(path, overrides)
        notices, sizes = loaded.notices, derived(loaded.config)
    for notice in notices:
        print(f"note: {notice}")
    for name, value in sizes.items():
        print(f"{name}: {value}")
    print("the config is sound")
    return 0
