"""Sinks by name. A sink's module imports its library at the top, so it is loaded only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from tandem.errors import ConfigError
from tandem.observability.sinks.aside import LIMIT_S, Aside
from tandem.observability.sinks.base import Generation, RunInfo, Sink

# name: ("module:attribute", what to install where the module's library is missing)
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
"""They write where the run itself does, in its order."""
_OWN = _HERE | {"tensorboard"}
"""Tandem brings what these need."""


class Sinks:
    """Several sinks as one. None of them ends a run, for metrics.jsonl has everything: one whose package is
    absent, that fails, or that does not answer within the limit is reported once and dropped.

    Args:
        names: keys of `SINKS`, such as `trainer.logger`.
        report: takes a sentence for the user when a sink was dropped.
        limit_s: seconds that a sink may take to begin, for one step, and at the end for all that is left.

    Raises:
        ConfigError: an unknown name.
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
            report(f"{error}\nThe run goes on without it; metrics.jsonl has everything.")
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
                self._report(f"logger {name} {trouble} and is switched off; metrics.jsonl goes on")

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.end()
        for sink in self._sinks.values():
            sink.join()
        self._drop_troubled()


def absent_sinks(names: Sequence[str]) -> dict[str, ConfigError]:
    """Those of these sinks whose package is not there or does not load, and what to do about it."""
    found: dict[str, ConfigError] = {}
    for name in [name for name in names if name not in _OWN]:
        try:
            _load(name)
        except Exception as error:  # a package may be broken in any way
            found[name] = ConfigError(
                f"the logger {name} needs a package that does not load here",
                field="trainer.logger",
                got=f"no module {error.name}" if isinstance(error, ModuleNotFoundError) else repr(error),
                remedy=f"pip install {SINKS[name][1]}, or leave {name} out of trainer.logger",
            )
    return found


def _load(name: str) -> Callable[[RunInfo], Sink]:
    module, attribute = SINKS[name][0].split(":")
    found = import_module(f"tandem.observability.sinks.{module}")
    factory: Callable[[RunInfo], Sink] = getattr(found, attribute)
    return factory
