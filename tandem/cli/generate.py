"""The command `tandem generate`."""

from __future__ import annotations

from tandem.cli.resolved import resolved
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.config.changed_models import given_name
from tandem.config.load import load_generate_config
from tandem.observability.terminal import say, warn


@worded
def generate(arguments: list[str]) -> int:
    """Generate responses to a file of prompts.

    usage: tandem generate [CONFIG.yaml] key=value … [--overwrite] [--dry-run]

    Give at least data.path=IN model.path=MODEL data.output_path=OUT. With rollout.n=4 each prompt gets four
    responses. OUT (.parquet or .jsonl) has the columns of IN and these columns, each a list with one entry
    per sample: responses, response_ids, response_log_probs, finish_reasons. If the command is killed, run it
    again: it continues after the work that is done. `tandem config explain rollout` lists the sampling keys.
      --overwrite   replace OUT, and drop unfinished work
      --dry-run     print the resolved config and stop
    """
    config = resolved(arguments, load_generate_config, ("--overwrite",))
    if config is None:
        return 0
    warn(
        f"answering {', '.join(config.data.path)} with {given_name(config.model.path)}; "
        f"the responses go to {config.data.output_path}"
    )
    generate_file = import_module("tandem.offline.generate").generate_file
    output = generate_file(config, overwrite="--overwrite" in arguments, say=warn)
    say(f"wrote {output}")
    return 0
