"""The start of each command's `--help`: an example, and the most important config keys."""

from __future__ import annotations

from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, shown
from tandem.config.section import Section
from tandem.config.supervised import RMConfig, SFTConfig

_TRAIN = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "custom_reward_function.path",
    "algorithm.adv_estimator",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "data.max_response_length",
    "actor_rollout_ref.actor.optim.lr",
    "trainer.total_training_steps",
    "trainer.default_local_dir",
)
_EXAMPLES = ("model.path", "data.train_files", "data.val_files", "data.train_batch_size", "data.max_length")
_RUN = ("optim.lr", "trainer.total_epochs", "trainer.save_freq", "trainer.default_local_dir")
_ANSWERS = ("model.path", "data.path", "data.output_path", "data.max_response_length", "data.max_samples")
_SAMPLED = ("rollout.n", "rollout.temperature", "rollout.top_p", "rollout.name")
CONFIGS: dict[str, tuple[type[Section], tuple[str, ...]]] = {
    "train": (TrainConfig, _TRAIN),
    "check": (TrainConfig, _TRAIN),
    "sft": (SFTConfig, (*_EXAMPLES, "data.messages_key", *_RUN)),
    "rm": (RMConfig, (*_EXAMPLES, "data.chosen_key", *_RUN)),
    "generate": (GenerateConfig, (*_ANSWERS, "data.prompt_key", *_SAMPLED)),
    "eval": (EvalConfig, (*_ANSWERS, "custom_reward_function.path", *_SAMPLED)),
}
COMMANDS = {
    "demo": "tandem demo spell_backward --algo ppo",
    "train": "tandem train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=MODEL \\\n"
    "      data.train_files=rows.parquet custom_reward_function.path=my_reward.py",
    "sft": "tandem sft model.path=MODEL data.train_files=demonstrations.jsonl trainer.total_epochs=3",
    "rm": "tandem rm model.path=MODEL data.train_files=preferences.parquet",
    "generate": "tandem generate model.path=MODEL data.path=prompts.jsonl data.output_path=answers.jsonl",
    "eval": "tandem eval model.path=MODEL data.path=rows.parquet data.output_path=report.json rollout.n=8",
    "runs": "tandem runs",
    "view": "tandem view runs/mine",
    "samples": "tandem samples runs/mine --step 40 --worst --n 3",
    "replay": "tandem replay runs/mine --step 40 --attribute algorithm.adv_estimator=rloo",
    "data": "tandem data validate train.parquet data.max_prompt_length=512",
    "bench": "tandem bench --dummy actor_rollout_ref.model.path=config.json algorithm.adv_estimator=grpo \\\n"
    "      data.train_batch_size=32 actor_rollout_ref.rollout.n=8 --lengths lognormal:300:800",
    "node": "srun tandem node -- tandem train config.yaml trainer.cluster.address=auto",
    "export": "tandem export runs/mine my-model --best",
    "check": "tandem check config.yaml actor_rollout_ref.rollout.n=8 --here",
    "models": "tandem models gemma",
    "plan": "tandem plan config.yaml actor_rollout_ref.model.path=Qwen/Qwen2.5-7B --devices 8x80GB",
    "from-trl": "tandem from-trl train_grpo.py -o config.yaml",
    "from-openrlhf": "tandem from-openrlhf train.sh -o config.yaml",
    "config": "tandem config explain actor_rollout_ref.rollout.n",
    "logs": "tandem logs runs/mine -f",
    "stacks": "tandem stacks runs/mine",
}
"""A dict from command to an example."""


def guide(command: str) -> str:
    """Return an example of a command, and its most important keys with their defaults."""
    lines = ["example:", f"  {COMMANDS[command]}", ""]
    if command in CONFIGS:
        root, names = CONFIGS[command]
        lines += ["most important keys (`tandem config explain KEY` explains them):"]
        known = keys(root)
        for key in (known[name] for name in names):
            simple = not key.required and key.inherits is None and key.default not in (None, ())
            lines += [f"  {key.name}={shown(key.default) if simple else '…'}"]
            lines += [f"      {key.info.description}"]
        lines += [""]
    return "\n".join(lines)
