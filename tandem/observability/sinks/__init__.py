"""Sinks: places for metrics besides metrics.jsonl in the run folder. Use `Sinks(names, info, report)`."""

from tandem.observability.sinks.base import Generation, RunInfo, Sink
from tandem.observability.sinks.registry import SINKS, Sinks, absent_sinks

__all__ = ["SINKS", "Generation", "RunInfo", "Sink", "Sinks", "absent_sinks"]
