"""Sinks by name. A sink's module imports its library at the top, so it is loaded only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from tandem.errors import ConfigError
from tandem.observability.sinks.base import Generation, RunInfo, Sink

# name: ("module:attribute", what to install where the module's library is missing)
SINKS = {
    "console": ("console:ConsoleSink", "rich"),
    "file": ("console:FileSink", "rich"),
    "tensorboard": ("tensorboard:TensorBoardSink", "tensorboard"),
    "wandb": ("wandb:WandbSink", "wandb"),
    "vemlp_wandb": ("vemlp_wandb:VemlpWandbSink", "volcengine-ml-platform"),
    "mlflow": ("mlflow:MLflowSink", "mlflow"),
    "swanlab": ("swanlab:SwanLabSink", "swanlab"),
    "clearml": ("clearml:ClearMLSink", "clearml"),
    "trackio": ("trackio:TrackioSink", "trackio"),
}


class Sinks:
    """Several sinks as one. A sink that fails while the run goes on is reported once and dropped: an
    experiment tracker out of reach must not end a training run, and metrics.jsonl has everything.

    Args:
        names: keys of `SINKS`, such as `trainer.logger`.
        report: takes a sentence for the user when a sink was dropped.

    Raises:
        ConfigError: an unknown name, or a sink whose library is not installed.
    """

    def __init__(self, names: Sequence[str], info: RunInfo, report: Callable[[str], None]) -> None:
        classes = {name: _load(name) for name in names}
        self._report = report
        self._sinks = {name: cls(info) for name, cls in classes.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(step, lambda sink: sink.log(step, metrics))

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        self._each(step, lambda sink: sink.log_generations(step, generations))

    def _each(self, step: int, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # whatever a tracker's client raises
                del self._sinks[name]
                self._report(
                    f"logger {name} failed at step {step} and is switched off ({error!r}); "
                    "metrics.jsonl goes on"
                )

    def close(self) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:  # must not hide what ended the run
                self._report(f"logger {name} failed to close ({error!r})")


def require_sinks(names: Sequence[str]) -> None:
    """Finds out before anything costly begins whether these sinks can be had.

    Raises:
        ConfigError: an unknown name, or a sink whose library is not installed.
    """
    for name in names:
        _load(name)


def _load(name: str) -> Callable[[RunInfo], Sink]:
    if name not in SINKS:
        raise ConfigError("unknown logger", field="trainer.logger", got=name, expected=", ".join(SINKS))
    target, package = SINKS[name]
    module, attribute = target.split(":")
    try:
        loaded = import_module(f"tandem.observability.sinks.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the logger {name} needs a package that is not installed",
            field="trainer.logger",
            got=f"no module {error.name}",
            remedy=f"pip install {package}, or leave {name} out of trainer.logger",
        ) from error
    factory: Callable[[RunInfo], Sink] = getattr(loaded, attribute)
    return factory
