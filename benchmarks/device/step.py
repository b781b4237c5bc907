"""Measure the phases of a GRPO step of the 1.5B with `tandem train`, beside a table for eight H100s.

The table is for verl 0.5.0 with R1-Distill-Qwen-1.5B: 512 samples of 14,255 tokens per step, which is 64
samples per GPU. This benchmark uses one GPU and 64 samples. One run has a quarter of that length and reports
the second of two steps. The other run has the whole length and one step. A step has two updates. The weights
are random, and all responses have the maximum length. Nothing is extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.device.commands import tandem
from benchmarks.device.rates import Rates
from benchmarks.device.report import Bound, Row, Setting, Skipped
from benchmarks.device.shapes import decode_seconds, forward_operations, model_folder
from tandem.demo.problems import LONGEST_PROMPT, split, write_problems
from tandem.observability.run import read_metrics

VERL = {"generation": 3496.0, "previous log-probs": 52090.0, "training": 14925.0}
"""Tokens/s per GPU in the users' table; the goal is twice as much."""
METRICS = {
    "generation": "perf/gen_tokens_per_s_per_device",
    "previous log-probs": "perf/log_prob_tokens_per_s_per_device",
    "training": "perf/train_tokens_per_s_per_device",
    "whole step": "perf/step_tokens_per_s",
}
ANSWERS = 8  # responses per prompt


@dataclass
class Run:
    """A training run that is made once for all rows that read its metrics.

    Attributes:
        size: the model.
        samples: samples per step.
        length: tokens of prompt and response together.
        steps: the number of steps; the last step is reported.
        expects_s: expected seconds of the command.
    """

    size: str
    samples: int
    length: int
    steps: int
    expects_s: float
    _found: dict[str, Any] = field(default_factory=dict)
    _error: Exception | None = None

    @property
    def name(self) -> str:
        return f"{self.samples} samples of {self.length} tokens"

    def metrics(self, setting: Setting) -> dict[str, Any]:
        """Return the metrics of the last step.

        Raises:
            Skipped: the command failed in an earlier row, or there is not enough time left.
        """
        if self._error is not None:
            raise Skipped(f"the run failed; see its generation row ({type(self._error).__name__})")
        if not self._found:
            # this also applies to later rows if the first row was skipped
            if setting.left_s < self.expects_s:
                raise Skipped(f"only {setting.left_s:.0f} s left, but the run needs {self.expects_s:.0f} s")
            try:
                self._found = self._run(setting)
            except Exception as error:
                self._error = error
                raise
        return self._found

    def _run(self, setting: Setting) -> dict[str, Any]:
        model = model_folder(self.size, setting.folder, setting.device)
        out, prompts = setting.folder / f"step_{self.length}", setting.folder / "step.parquet"
        write_problems(prompts, split(seed=0, train=512, validation=1).train, part="train")
        count = self.samples // ANSWERS
        words = {
            "actor_rollout_ref.model.path": model,
            "data.train_files": prompts,
            "data.train_batch_size": count,
            "data.max_prompt_length": LONGEST_PROMPT,
            "data.max_response_length": self.length - LONGEST_PROMPT,
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": ANSWERS,
            "actor_rollout_ref.rollout.ignore_eos": "true",
            # with one update per step, no old log-probs would be computed
            "actor_rollout_ref.actor.ppo_mini_batch_size": count // 2,
            "actor_rollout_ref.actor.use_dynamic_bsz": "true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(16384, self.length),
            "actor_rollout_ref.actor.optim.lr": 1e-6,
            "custom_reward_function.path": "benchmarks.device.spread_reward",
            "trainer.total_training_steps": self.steps,
            "trainer.val_before_train": "false",
            "trainer.test_freq": -1,
            "trainer.save_freq": -1,
            "trainer.device": setting.device.type,
            "trainer.resume_mode": "disable",
            "trainer.default_local_dir": out,
            "trainer.logger": "[console]",
        }
        tandem(setting, "train", *(f"{name}={value}" for name, value in words.items()), limit_s=600)
        return dict(read_metrics(out / "metrics.jsonl")[-1])


def rows(setting: Setting) -> list[Row]:
    if setting.tiny:
        runs = [Run("tiny", 16, 24, 1, 10)]
    else:
        runs = [Run("1.5B", 64, 3564, 2, 90), Run("1.5B", 64, 14255, 1, 270)]
    return [phase_row(run, phase, first=phase == "generation") for run in runs for phase in METRICS]


def phase_row(run: Run, phase: str, first: bool) -> Row:
    expects = run.expects_s if first else 0
    return Row(f"{phase}, {run.name}", partial(read, run, phase), expects, bound=bound_of(run, phase))


def bound_of(run: Run, phase: str) -> Bound | None:
    """Return the bound of a phase, or None for the whole step.

    Generation is bound by decoding at the mean context; the other phases by the operations of one or three
    passes.
    """

    def decoding(rates: Rates) -> float:
        step = decode_seconds(run.size, run.samples, run.length / 2, rates.copy, rates.product)
        return run.samples / step

    def computing(rates: Rates) -> float:
        passes = 3 if phase == "training" else 1
        return rates.product / (passes * forward_operations(run.size, run.length))

    return {"generation": decoding, "previous log-probs": computing, "training": computing}.get(phase)


def read(run: Run, phase: str, setting: Setting) -> dict[str, Any]:
    """Return the tokens/s of a phase, and its ratio to verl's."""
    found = run.metrics(setting)
    value = float(found[METRICS[phase]])
    told: dict[str, Any] = {"value": value}
    if phase in VERL and run.size == "1.5B":
        told["times_verl"] = value / VERL[phase]
    if phase == "whole step":
        told["metrics"] = {
            name: number
            for name, number in found.items()
            if name.split("/")[0] in ("timing", "perf", "tokens")
        }
    return told
