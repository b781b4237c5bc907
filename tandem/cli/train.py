"""`tandem train [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from importlib import import_module

from pyarrow import ArrowException, parquet

from tandem.config.load import load_train_config, to_yaml
from tandem.config.root import TrainConfig
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments
from tandem.errors import DataError
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
        print(to_yaml(loaded.config))
        for name, value in derived(loaded.config, train_rows=_rows(loaded.config)).items():
            print(f"# {name}: {value}")
        return 0
    run_ppo = import_module("tandem.trainer.run").run_ppo
    interrupted = run_ppo(loaded.config, say=say)
    return 130 if interrupted else 0


def _rows(config: TrainConfig) -> int | None:
    """Training rows before any filter, read from the files' footers; None where a file has none."""
    files = config.data.train_files
    if not all(file.endswith(".parquet") for file in files):
        return None
    rows = sum(map(_rows_of, files))
    most = config.data.train_max_samples
    return min(rows, most) if most > 0 else rows


def _rows_of(file: str) -> int:
    try:
        rows: int = parquet.read_metadata(file).num_rows
    except (OSError, ArrowException) as error:
        raise DataError(
            "not a readable parquet file",
            field=file,
            got=str(error).splitlines()[0],
            remedy="write the file anew; it may be cut off or of another format",
        ) from error
    return rows
