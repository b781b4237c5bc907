"""A command line written for verl, at the size of a tiny model, and ways to run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.load import load_train_config
from tandem.trainer.assembly import build_ppo
from tests.support.runs import Finished
from tests.support.tiny import make_model, write_problems
from tests.support.warm import WarmProcess
from tests.support.words import words as full_words

DOCUMENT = dict(
    word.split("=", 1)
    for word in full_words("""
algorithm.adv_estimator=grpo data.train_files=PATH data.val_files=PATH data.train_batch_size=4
data.max_prompt_length=8 data.max_response_length=6 data.filter_overlong_prompts=True data.truncation='error'
M.path=PATH A.optim.lr=1e-6 A.ppo_mini_batch_size=2 REF.fsdp_config.param_offload=True
A.fsdp_config.param_offload=True A.fsdp_config.optimizer_offload=True M.use_remove_padding=True
A.ulysses_sequence_parallel_size=1 A.ppo_micro_batch_size_per_gpu=1 REF.log_prob_micro_batch_size_per_gpu=1
R.log_prob_micro_batch_size_per_gpu=1 REF.log_prob_use_dynamic_bsz=True REF.log_prob_max_token_len_per_gpu=40
A.use_dynamic_bsz=True A.ppo_max_token_len_per_gpu=40 R.log_prob_use_dynamic_bsz=True
R.log_prob_max_token_len_per_gpu=40 A.use_kl_loss=True A.kl_loss_coef=0.001 A.kl_loss_type=low_var_kl
A.entropy_coeff=0 M.enable_gradient_checkpointing=True R.tensor_model_parallel_size=1 R.name=native
R.gpu_memory_utilization=0.4 R.n=3 R.temperature=0.6 R.top_k=1000000 R.top_p=1.0
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","tensorboard"]
trainer.project_name='verl_grpo_boba' trainer.experiment_name='ds_7b_fsdp_sglang' trainer.n_gpus_per_node=1
trainer.nnodes=1 trainer.val_before_train=False trainer.save_freq=50 trainer.test_freq=-1
trainer.total_epochs=15000
""")
)
"""The document's keys in its order, and its values except for what must fit this machine and a tiny model."""
BATCH, MINI, N = 4, 2, 3

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 6
"""
"""A reward that differs between samples even for an untrained model."""


class Shop:
    """A tiny model, its data, a reward, and a folder for runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.train, self.val = write_problems(folder)
        self.reward = folder / "reward.py"
        self.reward.write_text(REWARD)

    def document(self, *words: str) -> list[str]:
        """Return the document's command line, with keys and options replaced by those in `words`."""
        paths = f"data.train_files={self.train} data.val_files={self.val} M.path={self.model}"
        given = full_words(paths, *words)
        options = [word for word in given if "=" not in word]
        pairs = dict(word.split("=", 1) for word in given if "=" in word)
        return [f"{name}={value}" for name, value in (DOCUMENT | pairs).items()] + options

    def short(self, name: str, *words: str) -> list[str]:
        """Return the document's command line for one step, with little output, in the run folder `name`."""
        return self.document(
            "trainer.logger=[]",
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={self.folder / name}",
            f"custom_reward_function.path={self.reward}",
            *words,
        )

    def run(self, name: str, *words: str) -> Finished:
        loaded = load_train_config(None, self.short(name, *words))
        said = list(loaded.notices)
        trainer = build_ppo(loaded.config, say=said.append)
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
        return Finished(trainer, self.folder / name, said)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Shop(tmp_path_factory.mktemp("shop"))


SOURCES = Path(__file__).parents[2]


def start(words: list[str], cwd: Path, *, stdin: int | None = None) -> subprocess.Popen[str]:
    places = os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return WarmProcess([sys.executable, "-m", "tandem", "train", *words], cwd=cwd, env=env, **streams)


def finish(
    process: subprocess.Popen[str], typed: str | None = None, *, limit_s: float = 120
) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(typed, timeout=limit_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(words: list[str], cwd: Path, *, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    return finish(start(words, cwd), limit_s=limit_s)
