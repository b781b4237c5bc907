"""The registry of sinks, keyed by name. The module of a sink is imported only if the sink is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from tandem.errors import ConfigError
from tandem.observability.sinks.aside import LIMIT_S, Aside
from tandem.observability.sinks.base import Generation, RunInfo, Sink

# name: ("module:attribute", the package to install if the module's library is missing)
SINKS = {
    "console": ("live:console_sink", "rich"),
    "file": ("console:FileSink", "rich"),
    "tensorboard": ("tensorboard:TensorBoardSink", "tensorboard"),
    "wandb": ("wandb:WandbSink", "wandb"),
    "vemlp_wandb": ("vemlp_wandb:VemlpWandbSink", "volcengine-ml-platform"),
    "mlflow": ("mlflow:MLflowSink", "mlflow"),
    "swanlab": ("swanlab:SwanLabSink", "swanlab"),
    "clearml": ("clearml:ClearMLSink", "clearml"),
    "trackio": ("trackio:TrackioSink", "trackio"),
}
_HERE = frozenset({"console", "file"})
"""Sinks that write to the run's terminal or log. A call waits for them, to keep the lines in order."""
_OWN = _HERE | {"tensorboard"}
"""Sinks whose packages are installed with Tandem."""


class Sinks:
    """A sink that passes all calls to several sinks. A failing sink never stops the run.

    If a sink's package is missing, or if the sink fails or does not answer within the limit, a message names
    the sink and the sink is dropped. No metrics are lost, because metrics.jsonl has all metrics.

    Args:
        names: keys of `SINKS`, such as `trainer.logger`.
        info: facts about the run.
        report: a function that shows a sentence to the user when a sink is dropped.
        limit_s: the time limit of a sink, in seconds, for the start, for one step, and at the end for all
            remaining steps.

    Raises:
        ConfigError: If a name is unknown.
    """

    def __init__(
        self,
        names: Sequence[str],
        info: RunInfo,
        report: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        if unknown := [name for name in names if name not in SINKS]:
            raise ConfigError(
                "unknown logger", field="trainer.logger", got=", ".join(unknown), expected=", ".join(SINKS)
            )
        self._report = report
        absent = absent_sinks(names)
        for error in absent.values():
            report(f"{error}\nThe run continues without this logger; metrics.jsonl has all metrics.")
        self._sinks = {
            name: Aside(partial(_load(name), info), limit_s, waits=name in _HERE)
            for name in names
            if name not in absent
        }

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = dict(metrics)
        self._each(step, lambda sink: sink.log(step, kept))

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        self._each(step, lambda sink: sink.log_generations(step, generations))

    def _each(self, step: int, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks.values():
            sink.call(step, call)
        self._drop_troubled()

    def _drop_troubled(self) -> None:
        for name, sink in list(self._sinks.items()):
            if trouble := sink.trouble():
                del self._sinks[name]
                self._report(f"logger {name} {trouble} and is switched off; metrics.jsonl has all metrics")

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.end()
        for sink in self._sinks.values():
            sink.join()
        self._drop_troubled()


def absent_sinks(names: Sequence[str]) -> dict[str, ConfigError]:
    """Return a dict from sink to error, for the sinks whose package is missing or cannot be imported."""
    found: dict[str, ConfigError] = {}
    for name in [name for name in names if name not in _OWN]:
        try:
            _load(name)
        except Exception as error:  # a package may be broken in any way
            found[name] = ConfigError(
                f"the logger {name} needs a package that cannot be imported",
                field="trainer.logger",
                got=f"no module {error.name}" if isinstance(error, ModuleNotFoundError) else repr(error),
                remedy=f"run pip install {SINKS[name][1]}, or remove {name} from trainer.logger",
            )
    return found


def _load(name: str) -> Callable[[RunInfo], Sink]:
    module, attribute = SINKS[name][0].split(":")
    found = import_module(f"tandem.observability.sinks.{module}")
    factory: Callable[[RunInfo], Sink] = getattr(found, attribute)
    return factory
