"""The command `tandem eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tandem.cli.resolved import resolved
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.config.changed_models import given_name
from tandem.config.load import load_eval_config
from tandem.observability.terminal import plain_console, printable, say, warn


@worded
def evaluate(arguments: list[str]) -> int:
    """Measure the accuracy, pass@k and maj@k of a model.

    usage: tandem eval [CONFIG.yaml] key=value … [--overwrite] [--dry-run]

    The report has confidence intervals, for each data source and overall.
      generate responses and score them:
          data.path=PROBLEMS model.path=MODEL rollout.n=8 data.output_path=REPORT.json
      score responses that `tandem generate` wrote:
          data.path=RESPONSES data.output_path=REPORT.json
    A row's data source chooses its reward function. To use your own: custom_reward_function.path=FILE.py.
    The scored responses are written next to the report, as REPORT.samples.parquet. If the command is killed,
    run it again: it continues after the work that is done. `tandem config explain eval` lists the keys.
      --overwrite   replace the report, and drop unfinished work
      --dry-run     print the resolved config and stop
    """
    config = resolved(arguments, load_eval_config, ("--overwrite",))
    if config is None:
        return 0
    whose = "" if config.model.path is None else f"the responses of {given_name(config.model.path)} to "
    warn(f"scoring {whose}{', '.join(config.data.path)}; the report goes to {config.data.output_path}")
    evaluate_file = import_module("tandem.offline.eval").evaluate_file
    sources = evaluate_file(config, overwrite="--overwrite" in arguments, say=warn)
    plain_console().print(_table(sources, config.eval.confidence))
    say(f"wrote {config.data.output_path}")
    return 0


def _table(sources: Mapping[str, Any], confidence: float) -> Table:
    """Return a table with one row per measure and data source."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("data source", "measure", "value", f"{confidence:.0%} interval", "problems", "responses"):
        table.add_column(name, justify="left" if name in ("data source", "measure") else "right")
    # With one data source, the overall row would repeat its row.
    shown = dict(list(sources.items())[:1]) if len(sources) == 2 else sources
    for source, found in shown.items():
        head = (printable(source), str(found.problems), str(found.responses))
        for measure, estimate in found.measures.items():
            interval = f"{estimate.low:.3f} … {estimate.high:.3f}"
            table.add_row(head[0], measure, f"{estimate.value:.3f}", interval, *head[1:])
            head = ("", "", "")
    return table
