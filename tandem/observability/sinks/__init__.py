"""Sinks: loggers and trackers that receive a run's metrics. Use `Sinks(names, info, report)`."""

from tandem.observability.sinks.base import Generation, RunInfo, Sink
from tandem.observability.sinks.registry import SINKS, Sinks, absent_sinks

__all__ = ["SINKS", "Generation", "RunInfo", "Sink", "Sinks", "absent_sinks"]
