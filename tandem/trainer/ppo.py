"""The PPO family: one step of the algorithm, from prompts to updated weights, and the loop around it.

PPO: Schulman et al. 2017 (arXiv 1707.06347), for language models as in Ouyang et al. 2022
(arXiv 2203.02155). GRPO, RLOO and REINFORCE++ are the same loop with another advantage estimator and
no critic. The controller runs this file; each call on a role runs on that role's workers. What
passes between the calls are futures: the data goes from worker to worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tandem.algorithms.kl import AdaptiveKLController, FixedKLController
from tandem.config.root import TrainConfig
from tandem.data.loader import BatchLoader
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, SamplingParams
from tandem.runtime import BatchFuture, WorkerGroup
from tandem.trainer.evaluate import Evaluator
from tandem.trainer.session import Session, due
from tandem.trainer.steps import Plan, minibatches, throughput


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run; a role that the algorithm does not need is None.

    Attributes:
        actor: trains, samples and recomputes log-probs.
        reference: the frozen policy of the KL terms; may be the actor's group.
        critic: values.
        reward: scores of reward functions.
        batch: advantages and sample files.
    """

    actor: WorkerGroup
    reference: WorkerGroup | None
    critic: WorkerGroup | None
    reward: WorkerGroup
    batch: WorkerGroup


class PPOTrainer:
    """The controller of one run.

    Args:
        config: the resolved config.
        plan: what follows from it (total steps, what to compute).
        roles: the worker groups.
        sampling: how training responses are drawn.
        loader: training prompts.
        evaluator: validation, or None without validation data.
        kl_controller: the coefficient of the KL in the reward.
        session: the run folder, its metrics and checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        roles: Roles,
        sampling: SamplingParams,
        loader: BatchLoader,
        evaluator: Evaluator | None,
        kl_controller: FixedKLController | AdaptiveKLController,
        session: Session,
    ) -> None:
        self.config = config
        self.plan = plan
        self.roles = roles
        self.loader = loader
        self.evaluator = evaluator
        self.kl = kl_controller
        self.session = session
        rollout = config.actor_rollout_ref.rollout
        self.n = rollout.n
        self.sampling = sampling

    def fit(self) -> None:
        """Runs to the last step, or to an interrupt, whose step is finished and saved first."""
        trainer, evaluator = self.config.trainer, self.evaluator
        with self.session as session:
            step = session.restore(self.load_state_dict, forget=not trainer.val_only)
            if evaluator and (trainer.val_only or (trainer.val_before_train and step == 0)):
                session.log(step, session.restored | evaluator.run(step) | session.timeline.take())
            stop = trainer.val_only or session.interrupted
            while step < self.plan.total_steps and not stop:
                step += 1
                last = step == self.plan.total_steps
                with session.phase("step"):
                    metrics = self.step(step, self.loader.next())
                metrics |= self._timings(metrics)
                if evaluator and due(trainer.test_freq, step, last):
                    with session.phase("testing"):  # after the step's own observations were taken
                        metrics |= evaluator.run(step)
                stop = session.interrupted  # read once: an interrupt after this is for the next step
                if due(trainer.save_freq, step, last) or stop:
                    session.save(step, self.state_dict(), metrics)
                session.log(step, metrics | session.timeline.take())

    def step(self, step: int, prompts: DataProto) -> dict[str, float]:
        """One iteration of the algorithm.

        Args:
            step: its number, from 1.
            prompts: `train_batch_size` prompts.

        Returns:
            its metrics.
        """
        roles, plan = self.roles, self.plan

        batch: BatchFuture = roles.actor.generate_sequences(prompts, self.n, self.sampling)
        with self.session.phase("reward"):
            batch = batch.union(roles.reward.compute_rewards(batch))
        if plan.recompute_old:
            batch = batch.union(roles.actor.compute_log_prob(batch))
        if roles.reference:
            batch = batch.union(roles.reference.compute_ref_log_prob(batch))
        if roles.critic:
            batch = batch.union(roles.critic.compute_values(batch))
        with self.session.phase("adv"):
            batch = batch.union(roles.batch.compute_advantages(batch, self.kl_coef))

        updates: list[Metrics] = []
        if roles.critic:
            for mini in minibatches(batch, plan.critic, step):
                updates.append(prefixed("critic", roles.critic.update_critic(mini)))
        if step > self.config.trainer.critic_warmup:
            for mini in minibatches(batch, plan.actor, step):
                updates.append(prefixed("actor", roles.actor.update_actor(mini)))

        metrics = self._measure(step, batch, Metrics.merged(updates))
        if self.config.algorithm.use_kl_in_reward:
            metrics["actor/kl_coef"] = self.kl.value
            self.kl.update(metrics["actor/kl_in_reward"], n_steps=plan.batch_samples)
        return metrics

    @property
    def kl_coef(self) -> float:
        """The weight of the KL penalty in the reward."""
        return self.kl.value if self.config.algorithm.use_kl_in_reward else 0.0

    def _measure(self, step: int, batch: BatchFuture, updates: Metrics) -> dict[str, float]:
        """What is reported of a step."""
        roles = self.roles
        if self.session.writes_samples(step):
            with self.session.phase("write_samples"):
                roles.batch.write_samples(step, batch)
        measured = roles.batch.measure(batch)
        observed = [part for group in self._engines() for part in group.take_observed()]
        metrics = Metrics.merged([measured, updates, *observed]).to_floats()
        metrics["training/epoch"] = self.loader.epoch
        if "actor/kl_in_reward" in metrics:
            metrics.setdefault("actor/kl", metrics["actor/kl_in_reward"])
        return metrics

    def _timings(self, metrics: dict[str, float]) -> dict[str, float]:
        seconds = self.session.timeline.take()
        for group in self._engines():
            for taken in group.take_timings():  # of each rank; the slowest counts
                seconds |= {name: max(value, seconds.get(name, 0.0)) for name, value in taken.items()}
        return throughput(seconds, metrics, self.plan)

    def _engines(self) -> list[WorkerGroup]:
        """The groups that hold engines, each once."""
        groups = [self.roles.actor, self.roles.reference, self.roles.critic]
        return list({id(group): group for group in groups if group}.values())

    def state_dict(self) -> dict[str, Any]:
        """The controller's own state; the models' is their workers'."""
        return {"loader": self.loader.state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.kl.load_state_dict(state["kl"])


def prefixed(role: str, metrics: Metrics) -> Metrics:
    """The metrics of one of a role's updates under its name (names with a slash already say whose they
    are). What micro-batches add up to, such as the loss, is averaged over a step's updates."""
    return Metrics(
        {
            name if "/" in name else f"{role}/{name}": replace(m, reduction="mean", weight=1.0)
            if m.reduction == "sum"
            else m
            for name, m in metrics.items()
        }
    )
