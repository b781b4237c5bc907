"""The PPO family: one step of the algorithm, from prompts to updated weights.

`PPOTrainer.generate` and `PPOTrainer.learn` are the two halves of a step.

PPO: Schulman et al. 2017 (arXiv 1707.06347), for language models as in Ouyang et al. 2022 (arXiv 2203.02155).
GRPO, RLOO and REINFORCE++ use the same step with another advantage estimator and no critic. This file runs in
the controller. Each call on a role runs on that role's workers. The calls pass futures to each other, so data
goes directly from worker to worker. Calls run at the same time if they do not need each other's results and
their roles have separate processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from tandem.algorithms.entropy import AdaptiveEntropyController
from tandem.algorithms.kl import kl_controller
from tandem.config.root import TrainConfig
from tandem.errors import CheckpointError
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, SamplingParams
from tandem.runtime import BatchFuture, Future, Placement, WorkerGroup
from tandem.trainer.exact_kl import ExactKL
from tandem.trainer.gathering import Evaluator, Gathered, Gatherer
from tandem.trainer.launch import Launcher
from tandem.trainer.loop import Loop, Rhythm, Schedule
from tandem.trainer.perf import take_observed, take_usage, throughput
from tandem.trainer.roles import Roles
from tandem.trainer.session import Session
from tandem.trainer.steps import Plan, minibatches, updates_per_step
from tandem.watch.checks import Facts
from tandem.watch.integrity import PROMPTS_USED
from tandem.watch.trust import EXPLAINED_SAMPLES

Updates = list[tuple[str, Future[Metrics]]]  # the role of each update, and its metrics


class PPOTrainer(Loop[Gathered]):
    """The controller of one reinforcement learning run.

    Args:
        config: The config of the run.
        plan: The numbers of steps and mini-batches, and the columns to compute, as derived from the config.
        session: The run folder, metrics and checkpoints.
        launcher: The launcher that started the worker groups, which can move them.
        roles: The worker groups.
        gatherer: Generates and scores the responses of each step.
        evaluator: Runs the validation; None without validation data.
        schedule: Decides when the run generates and when it learns; see `Loop`.
        memory: A dict from phase (as in `timing/PHASE`) to the planned bytes.

    Attributes:
        kl: Controls the coefficient of the KL penalty in the reward.
        entropy: Adapts the coefficient of the entropy bonus after each step; None if it is fixed.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        session: Session,
        launcher: Launcher,
        roles: Roles,
        gatherer: Gatherer,
        evaluator: Evaluator | None,
        schedule: Schedule[Gathered] | None = None,
        memory: Mapping[str, float] | None = None,
    ) -> None:
        rhythm = Rhythm.of(config.trainer, plan.total_steps)
        super().__init__(rhythm, gatherer.prompts, session, launcher.backend, schedule)
        kl, entropy = config.algorithm.kl_ctrl, config.actor_rollout_ref.actor.adaptive_entropy
        self.config = config
        self.plan = plan
        self.launcher = launcher
        self.roles = roles
        self.gatherer = gatherer
        self.evaluator = evaluator
        self.kl = kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)
        self.entropy: AdaptiveEntropyController | None = None
        if entropy.enabled:
            self.entropy = AdaptiveEntropyController(
                config.actor_rollout_ref.actor.entropy_coeff,
                target=entropy.target_entropy,
                delta=entropy.delta_ent_coef,
                minimum=entropy.min_ent_coef,
                maximum=entropy.max_ent_coef,
            )
        self.memory = memory or {}
        self.facts = Facts.of(
            config,
            gatherer.params,
            updates=updates_per_step(plan.batch_samples, plan.actor),
            recompute_old=plan.recompute_old and not plan.bypasses,
            experiments=hasattr(roles.actor, "explain_gap"),
        )
        self._rollout_is_current = False
        self.exact_kl = ExactKL(plan.exact_kl)
        self._reference_step = 0

    def generate(self, step: int, prompts: BatchFuture) -> Gathered:
        """Generate and score the samples of a step.

        Args:
            step: The number of the step, from 1.
            prompts: `train_batch_size` prompts, or the first generation batch with `algorithm.filter_groups`.
        """
        self._update_rollout()
        plan = self.plan.at(step)
        return self.gatherer.gather(self.roles, prompts, plan.n, greedy_baselines=plan.greedy_baselines)

    def learn(self, step: int, gathered: Gathered) -> dict[str, float]:
        """Compute log-probs, values and advantages of the samples, and update the models.

        Args:
            step: The number of the step, from 1.
            gathered: The scored samples.

        Returns:
            The metrics of the step.
        """
        roles, plan, samples = self.roles, self.plan.at(step), gathered.samples
        left_out = self._left_out(samples, gathered.scores)
        if self.session.watch.needs_experiments:
            roles.actor.explain_gap(samples.rows(slice(EXPLAINED_SAMPLES)))
        learns = step > self.config.trainer.critic_warmup
        reference = self.exact_kl.query(roles, samples)
        columns = [gathered.scores, *reference.log_probs, *gathered.baselines]
        if plan.recompute_old or not (learns or plan.bypasses):  # else the rollout's log-probs are used
            columns.append(roles.actor.compute_log_prob(reference.with_hidden("reward", samples)))
        if roles.critic:
            columns.append(roles.critic.compute_values(samples))
        batch = samples.union(*columns)
        batch = batch.union(roles.batch.compute_advantages(batch, self.kl_coef))

        updates: Updates = []
        without = None if left_out is None else left_out.get()
        if roles.critic:
            for mini in minibatches(batch, len(samples), plan.critic, step, without):
                updates.append(("critic", roles.critic.update_critic(mini)))
        if learns:
            learnt = reference.with_hidden("loss", batch)
            for number, mini in enumerate(minibatches(learnt, len(samples), plan.actor, step, without)):
                updates.append(("actor", roles.actor.update_actor(mini, **self.actor_options(number))))
            self._rollout_is_current = False

        metrics = gathered.metrics | self._measure(step, batch, updates) | self._reset_reference(step)
        if self.entropy is not None and "actor/entropy" in metrics:  # the actor was updated
            metrics["actor/entropy_coeff"] = self.entropy.value
            self.entropy.update(metrics["actor/entropy"])
        self.gatherer.dealer.learn(gathered.prompts.index, samples.index)
        if self.config.algorithm.use_kl_in_reward:
            metrics["actor/kl_coef"] = self.kl.value
            self.kl.update(metrics["actor/kl_in_reward"], n_steps=plan.batch_samples)
        return metrics

    def _left_out(self, samples: BatchFuture, scores: BatchFuture) -> Future[np.ndarray] | None:
        """Return a mask of the samples that no update uses; None if all samples are used."""
        batch = samples.select("finish_reason", "uid")
        masks_truncated = self.config.algorithm.mask_truncated_completions
        if self.config.leaves_out_failed:
            batch = batch.union(scores.select("reward_failed"))
        elif not masks_truncated:
            return None
        found: Future[np.ndarray] = self.roles.batch.left_out(batch, masks_truncated)
        return found

    def _reset_reference(self, step: int) -> dict[str, float]:
        """Copy the actor's weights to the reference every `ref.reset_interval` steps.

        The metric `actor/reference_step` is the step whose actor was the reference in this step.
        """
        ref = self.config.actor_rollout_ref.ref
        if not (self.roles.reference and ref.reset_interval):
            return {}
        metrics = {"actor/reference_step": float(self._reference_step)}
        if step % ref.reset_interval == 0:
            self.roles.reset_reference(optimizer=ref.reset_optimizer)
            self._reference_step = step
            self.exact_kl.forget_head()
        return metrics

    @property
    def kl_coef(self) -> float:
        """The weight of the KL penalty in the reward."""
        return self.kl.value if self.config.algorithm.use_kl_in_reward else 0.0

    def actor_options(self, number: int) -> dict[str, Any]:
        """Return more arguments for the actor's update `number`, counted from 0 in each step."""
        moving = {} if self.entropy is None else {"entropy_coeff": self.entropy.value}
        return moving | ({"first": number == 0} if self.plan.bypasses else {})

    @property
    def can_validate(self) -> bool:
        return self.evaluator is not None

    def validate(self, step: int) -> dict[str, float]:
        assert self.evaluator is not None
        self._update_rollout()
        metrics = self.evaluator.run(step, self.roles)
        self.session.show_generations(step, self.evaluator.shown)
        return metrics

    def sample(self, prompts: DataProto, n: int, params: SamplingParams) -> list[Tensor]:
        """Return the tokens of n responses to each prompt, sampled from the current policy.

        Args:
            prompts: The columns `prompts` (ragged int64 token ids) and `uid`.
            n: The number of responses to each prompt.
            params: How responses are sampled.
        """
        self._update_rollout()
        samples = self.roles.rollout.generate_sequences(prompts, n, params).get()
        rows = zip(samples.ragged("tokens"), samples.ragged("response_mask"), strict=True)
        return [tokens[written] for tokens, written in rows]

    def _update_rollout(self) -> None:
        if not self._rollout_is_current:
            self.roles.sync_rollout()
            self._rollout_is_current = True

    def _measure(self, step: int, batch: BatchFuture, updates: Updates) -> dict[str, float]:
        """Wait until the step is done on all workers, and return its metrics."""
        roles = self.roles
        written = roles.batch.write_samples(step, batch) if self.rhythm.writes_samples(step) else None
        measured: Future[Metrics] = roles.batch.measure(batch)
        learnt = [prefixed(role, future.get()) for role, future in updates]
        metrics = Metrics.merged([measured.get(), *learnt, take_observed(self.groups)]).to_floats()
        metrics[PROMPTS_USED] = float(self.prompts.used * self.prompts.batch_size)
        metrics = self.session.watch.check_samples(step, metrics, self.facts)
        if written is not None:
            written.get()
        metrics["training/epoch"] = self.prompts.epoch
        if "actor/kl_in_reward" in metrics:
            metrics.setdefault("actor/kl", metrics["actor/kl_in_reward"])
        return metrics

    @property
    def groups(self) -> Sequence[WorkerGroup]:
        return self.roles.groups

    def rates(self, seconds: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return timings, rates, the utilization of each role's processes, and each phase's planned memory.

        On GPUs, the workers measure the memory of the same phases.
        """
        devices = {"actor": self.roles.actor.world_size, "rollout": self.roles.rollout.world_size}
        predicted = {
            f"perf/memory_predicted_bytes/{phase}": size
            for phase, size in self.memory.items()
            if f"timing/{phase}" in seconds
        }
        usage = take_usage(self.groups, seconds["timing/step"])
        return throughput(seconds, metrics, self.plan, devices) | usage | predicted

    def reallocate(self, placement: Placement) -> None:
        """Move the roles to other processes. Call this only between two steps.

        The models are saved in a checkpoint of the last step and loaded in the new processes. So training
        continues with the same state.

        Args:
            placement: The new processes of each role.

        Raises:
            ConfigError: The new processes do not exist. The run has then ended. You can resume it from the
                checkpoint.
        """
        path = self.save_last()
        self.roles = self.launcher.move(self.roles, placement)
        self.session.members = self.roles.members
        self.session.load_members(path)
        self.forget_measures()
        self._rollout_is_current = False
        self.exact_kl.forget_head()

    def state_dict(self) -> dict[str, Any]:
        entropy = {} if self.entropy is None else {"entropy": self.entropy.state_dict()}
        return {
            "loader": self.prompts.state_dict(),
            "kl": self.kl.state_dict(),
            "reference_step": self._reference_step,
            "scoring": self.roles.scoring.state_dict(),
            **entropy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            CheckpointError: The saved run had reset its reference, but this config would use the original
                reference.
        """
        self._reference_step = state.get("reference_step", 0)
        interval = self.config.actor_rollout_ref.ref.reset_interval
        if self._reference_step and self.roles.reference and not interval:
            raise CheckpointError(
                "the checkpoint's reference policy is no longer the model that the run started with",
                field="actor_rollout_ref.ref.reset_interval",
                got=f"{interval}, with a reference of step {self._reference_step}",
                expected="a positive number of steps",
                remedy="set this key to its old value, or to more steps than the run has left",
            )
        self.prompts.load_state_dict(state["loader"])
        self.kl.load_state_dict(state["kl"])
        self.roles.scoring.load_state_dict(state.get("scoring", {}))
        if self.entropy is not None and "entropy" in state:
            self.entropy.load_state_dict(state["entropy"])


def prefixed(role: str, metrics: Metrics) -> Metrics:
    """Return the metrics of one update with the role's name as a prefix.

    Names with a slash have a prefix already, and `router/` alone is the actor's. Metrics that are summed over
    micro-batches, such as the loss, are averaged over the updates of a step.
    """
    found = Metrics()
    for name, metric in metrics.items():
        own = "/" not in name or (role != "actor" and name.startswith("router/"))
        summed = metric.reduction == "sum"
        averaged = replace(metric, reduction="mean", weight=1.0) if summed else metric
        found[f"{role}/{name}" if own else name] = averaged
    return found
