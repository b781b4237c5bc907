"""The commands `tandem config show` and `tandem config explain`."""

from __future__ import annotations

from inspect import getdoc

from tandem.cli.resolved import LOADERS
from tandem.config.explain import explain, overview
from tandem.config.sources import split_arguments, to_yaml
from tandem.config.written import to_dict
from tandem.errors import ConfigError
from tandem.observability.terminal import warn


def config(arguments: list[str]) -> int:
    """Show a resolved config, or explain a key.

    usage: tandem config show [CONFIG.yaml] key=value … [--sft | --rm]
           tandem config explain KEY …

    show      prints the resolved config with every key, as YAML; without arguments, all keys and
              their defaults
    explain   prints a key's type, default and meaning, and which code reads it; for a section, it
              lists the keys
      --sft   a config of `tandem sft`, not of `tandem train`
      --rm    a config of `tandem rm`
    """
    match arguments:
        case [] | ["-h" | "--help", *_] | ["show" | "explain", "-h" | "--help", *_]:
            print(getdoc(config))
        case ["show", *rest]:
            command = "sft" if "--sft" in rest else "rm" if "--rm" in rest else "train"
            _show([word for word in rest if word not in ("--sft", "--rm")], command)
        case ["explain", name, *more]:
            print("\n\n".join(explain(key) for key in (name, *more)))
        case _:
            raise ConfigError(
                "unknown subcommand, or no key was given",
                got=" ".join(arguments),
                expected="show [CONFIG.yaml] key=value …, or explain KEY …",
                remedy="run `tandem config --help`",
            )
    return 0


def _show(words: list[str], command: str) -> None:
    if not words:
        print(overview(f"tandem {command}"))
        return
    loaded = LOADERS[command](*split_arguments(words))
    for notice in loaded.notices:
        warn(f"note: {notice}")
    print(to_yaml(to_dict(loaded.config)), end="")
