"""The command `tandem train`."""

from __future__ import annotations

from tandem.cli import from_verl
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.config.changed_models import given_name
from tandem.config.load import Loaded, load_train_config
from tandem.config.root import TrainConfig
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments, to_yaml
from tandem.config.written import to_dict
from tandem.data.files import count_rows
from tandem.observability.terminal import say, warn
from tandem.trainer.here import lacking, refuse


@worded
def train(arguments: list[str]) -> int:
    """Train a policy by reinforcement learning.

    usage: tandem train [CONFIG.yaml] key=value … [--dry-run]
           tandem train --from-verl SCRIPT.sh [key=value …] [-- ARGUMENTS…]

    `tandem config show` lists all keys; values are YAML. You can use a verl command line: all
    arguments after `-m verl.trainer.main_ppo` work here too, including --config-path and --config-name.
      --dry-run   print the resolved config and the sizes that follow from it, and stop
      --from-verl SCRIPT.sh [-- ARGUMENTS…]
                  read the settings from a shell script that calls verl. bash runs the script with verl's
                  trainer replaced; a table shows the settings of the call. Settings key=value that you
                  add override them. ARGUMENTS are the arguments of the script ("$@"). Of the script's other
                  commands, only programs that print are run, and the rest is listed. The script cannot
                  change files or use the network
      --call N    if the script calls verl several times, use the N-th call
      --script-limit SECONDS   how long reading the script may take
    Ctrl-C or SIGTERM stops the run after the current step: the step is saved, and the exit status is 130. A
    second signal stops the run at once.
    """
    dry = "--dry-run" in arguments
    words = [word for word in arguments if word != "--dry-run"]
    request = from_verl.requested(words)
    if request is None:
        loaded = load_train_config(*split_arguments(words), count_rows=count_rows)
        for notice in loaded.messages:
            warn(f"note: {notice}")
        return _train(loaded, dry=dry)
    return _train(from_verl.load(request), dry=dry)


def _train(loaded: Loaded[TrainConfig], *, dry: bool) -> int:
    if dry:
        data = loaded.config.data
        rows = count_rows(data.train_files, data.train_max_samples)
        print(to_yaml(to_dict(loaded.config)))
        for name, value in derived(loaded.config, train_rows=rows).items():
            print(f"# {name}: {value}")
        return 0
    refuse(lacking(loaded.config))
    model = given_name(loaded.config.actor_rollout_ref.model.path)
    say(f"loading {model} for {loaded.config.trainer.default_local_dir}")
    return 130 if import_module("tandem.trainer.run").run_ppo(loaded.config, say=say) else 0
