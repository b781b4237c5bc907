"""`tandem eval [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tandem.cli.resolved import resolved
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.config.load import load_eval_config
from tandem.observability.terminal import plain_console, printable, say, warn


@worded
def evaluate(arguments: list[str]) -> int:
    """usage: tandem eval [CONFIG.yaml] key=value … [--overwrite] [--dry-run]

    Accuracy, pass@k and maj@k, with confidence intervals, for each data source and overall:
      data.path=PROBLEMS model.path=MODEL rollout.n=8 data.output_path=REPORT.json
      data.path=RESPONSES data.output_path=REPORT.json        of what `tandem generate` wrote
    Rewards go by data source, or are your own: custom_reward_function.path=FILE.py. The scored responses
    are written beside the report, as REPORT.samples.parquet. Killed at any moment, the same command goes on
    from what was finished. `tandem config explain eval` lists the keys.
      --overwrite   replace the report, and drop unfinished work
      --dry-run     print the resolved config and stop
    """
    config = resolved(arguments, load_eval_config, ("--overwrite",))
    if config is None:
        return 0
    whose = "" if config.model.path is None else f"what {config.model.path} answers to "
    warn(f"scores {whose}{', '.join(config.data.path)}, to {config.data.output_path}")
    evaluate_file = import_module("tandem.offline.eval").evaluate_file
    sources = evaluate_file(config, overwrite="--overwrite" in arguments, say=warn)
    plain_console().print(_table(sources, config.eval.confidence))
    say(f"wrote {config.data.output_path}")
    return 0


def _table(sources: Mapping[str, Any], confidence: float) -> Table:
    """A row for each measure of each source."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("data source", "measure", "value", f"{confidence:.0%} interval", "problems", "responses"):
        table.add_column(name, justify="left" if name in ("data source", "measure") else "right")
    shown = dict(list(sources.items())[:1]) if len(sources) == 2 else sources  # one source is all there is
    for source, found in shown.items():
        head = (printable(source), str(found.problems), str(found.responses))
        for measure, estimate in found.measures.items():
            interval = f"{estimate.low:.3f} … {estimate.high:.3f}"
            table.add_row(head[0], measure, f"{estimate.value:.3f}", interval, *head[1:])
            head = ("", "", "")
    return table
