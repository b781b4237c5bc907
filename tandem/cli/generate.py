"""`tandem generate [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from tandem.cli.resolved import resolved
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.config.load import load_generate_config
from tandem.observability.terminal import say, warn


@worded
def generate(arguments: list[str]) -> int:
    """usage: tandem generate [CONFIG.yaml] key=value … [--overwrite] [--dry-run]

    Answers a file of prompts: data.path=IN model.path=MODEL data.output_path=OUT rollout.n=4 …
    OUT (.parquet or .jsonl) has the columns of IN and, as lists with one entry per sample: responses,
    response_ids, response_log_probs, finish_reasons. Killed at any moment, the same command goes on from
    what was finished. `tandem config explain rollout` lists the keys.
      --overwrite   replace OUT, and drop unfinished work
      --dry-run     print the resolved config and stop
    """
    config = resolved(arguments, load_generate_config, ("--overwrite",))
    if config is None:
        return 0
    warn(f"answers {', '.join(config.data.path)} with {config.model.path}, to {config.data.output_path}")
    generate_file = import_module("tandem.offline.generate").generate_file
    output = generate_file(config, overwrite="--overwrite" in arguments, say=warn)
    say(f"wrote {output}")
    return 0
