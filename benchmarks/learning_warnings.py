"""Count the warnings in runs that learn well, where every warning is a false alarm.

Each run is a real run through the trainer on one core. There are two kinds. The first kind has every
advantage estimator and every policy loss with several seeds, on a task that a random model learns within
seconds: write digits instead of letters. The second kind has special settings (few prompts per step, a KL
term, an entropy bonus, filtered prompts) on the task of `tandem demo`, from its warm model. The program
prints the warnings of each run, and its reward in the first and last sixth of its steps. At the end it prints
the number of runs without a warning. Runs whose reward did not rise are counted separately. Finished runs in
the folder are not repeated.

    python benchmarks/learning_warnings.py [--only NAME …] [--seeds N] [--limit SECONDS] [--folder DIR]
        [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_curves import ACTOR, Cell, cells, machine, task
from tiny import arguments, small_demo

from tandem.algorithms.registry import ADVANTAGES
from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors
from tandem.observability.reading import Run, is_run
from tandem.trainer.run import run_ppo

STEPS = 30
GROUPS = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4")
SINGLE = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.n=1")
DIGITS = (
    "data.max_prompt_length=16",
    "data.max_response_length=6",
    f"{ACTOR}.optim.lr=1e-3",
    f"custom_reward_function.path={__file__}",
    "custom_reward_function.name=digits",
)
"""Keys for the task of digits, in addition to the cell's keys: 64 samples per step in two updates."""
KL_COEF = f"{ACTOR}.kl_loss_coef=0.005"
MANY = ("actor_rollout_ref.rollout.n=4", f"{ACTOR}.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=32")
SETTINGS = {
    "few prompts": (
        "grpo",
        ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.optim.lr=1e-4"),
    ),
    "KL in the loss": ("grpo", (f"{ACTOR}.use_kl_loss=true", KL_COEF)),
    "KL in the reward": ("gae", ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.005")),
    "entropy bonus": ("grpo", (f"{ACTOR}.entropy_coeff=0.003",)),
    "prompts left out": ("grpo", ("algorithm.filter_groups.enable=true",)),
    "four answers for GAE": ("gae", ("data.train_batch_size=128", *MANY)),
}


def digits(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """Return the share of digits in the first four characters, with a component for each half."""
    first, second = (sum(map(str.isdigit, part)) / 2 for part in (solution_str[:2], solution_str[2:4]))
    return {"score": (first + second) / 2, "right": first, "worked": second}


@dataclass(frozen=True)
class Healthy:
    """One run: the cell of an algorithm, and the special setting if the run has one."""

    cell: Cell
    setting: str = ""

    @property
    def name(self) -> str:
        return self.setting or self.cell.name

    def words(self, folder: Path, steps: int) -> list[str]:
        made = task(folder, 0)
        model = made / ("warm_model" if self.setting else "model")
        columns = ADVANTAGES.find(self.cell.estimator).columns
        own = [word for word in self.cell.words() if self.setting or "mini_batch" not in word]
        critic = ("critic.ppo_mini_batch_size=32",) if "values" in columns else ()
        beyond = (*(GROUPS if "group" in columns else SINGLE), *DIGITS, *critic)
        return [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={made / 'train.parquet'}",
            *own,
            "trainer.test_freq=-1",
            "reward.num_workers=0",
            "trainer.samples_freq=-1",
            f"trainer.total_training_steps={5 * steps if self.setting == 'few prompts' else steps}",
            f"trainer.default_local_dir={folder / 'runs' / self.name}",
            *(SETTINGS[self.setting][1] if self.setting else beyond),
        ]


def healthy_runs(seeds: int) -> list[Healthy]:
    of_algorithms = sorted(cells([], seeds), key=lambda cell: cell.seed)
    of_settings = [Healthy(Cell(estimator, "vanilla", 0), name) for name, (estimator, _) in SETTINGS.items()]
    return [Healthy(cell) for cell in of_algorithms] + of_settings


def outcome(healthy: Healthy, folder: Path, steps: int) -> dict[str, Any]:
    """Run it unless it is finished, and return its rewards and warnings."""
    try:
        config = load_train_config(None, healthy.words(folder, steps)).config
    except ConfigErrors as refused:
        return {"run": healthy.name, "refused": str(refused.errors[0])}
    run = Path(config.trainer.default_local_dir)
    if not is_run(run) or Run(run).state != "finished":
        shutil.rmtree(run, ignore_errors=True)
        if run_ppo(config, say=lambda sentence: None):
            sys.exit("interrupted")
    read = Run(run)
    rewards = [reward for _, reward in read.curve("reward/mean")]
    told = [event for event in read.events if event["event"] == "warning"]
    warnings = [(event["step"], event["name"], event["text"]) for event in told]
    edge = len(rewards) // 6
    return {
        "run": healthy.name,
        "rewards": [sum(rewards[:edge]) / edge, sum(rewards[-edge:]) / edge],
        "warnings": warnings,
        "most": {
            name: max((abs(value) for _, value in read.curve(name)), default=None)
            for name in ("actor/ppo_kl", "actor/clip_fraction", "actor/kl", "reward/zero_std_share")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only runs whose name contains one of these"
    )
    parser.add_argument("--seeds", type=int, default=2, help="seeds for each estimator and loss")
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="start no further run after this number of seconds"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tandem_learning_warnings",
        help="folder for the warm model, which is made once, and the runs",
    )
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = arguments(parser, only=["rloo"], seeds=1)
    found, began = [], time.monotonic()
    for healthy in healthy_runs(options.seeds):
        wanted = not options.only or any(part in healthy.name for part in options.only)
        if wanted and time.monotonic() - began < options.limit:
            with small_demo() if options.tiny else nullcontext():
                found.append(outcome(healthy, options.folder, 6 if options.tiny else STEPS))
            print(json.dumps(found[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")
    ran = [each for each in found if "refused" not in each]
    rose = [each for each in ran if each["rewards"][1] > each["rewards"][0]]
    quiet = [each for each in rose if not each["warnings"]]
    print(f"{len(ran)} runs; the reward rose in {len(rose)} of them, {len(quiet)} of these had no warning")


if __name__ == "__main__":
    main()
