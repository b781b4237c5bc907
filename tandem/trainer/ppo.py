"""The PPO family: one step of the algorithm, from prompts to updated weights, and the loop around it.

PPO: Schulman et al. 2017 (arXiv 1707.06347), for language models as in Ouyang et al. 2022
(arXiv 2203.02155). GRPO, RLOO and REINFORCE++ are the same loop with another advantage estimator and
no critic. The controller runs this file; each call on a role runs on that role's workers. What
passes between the calls are futures: the data goes from worker to worker, and calls that do not
need each other's results run at the same time where their roles have processes of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.algorithms.kl import AdaptiveKLController, FixedKLController
from tandem.config.root import TrainConfig
from tandem.observability.metrics import Metrics
from tandem.protocol import SamplingParams
from tandem.runtime import BatchFuture, Future, Placement
from tandem.trainer.dealing import Dealer
from tandem.trainer.evaluate import Evaluator
from tandem.trainer.launch import Launcher
from tandem.trainer.perf import throughput
from tandem.trainer.probes import TrustProbe
from tandem.trainer.prompts import Prompts
from tandem.trainer.roles import Roles
from tandem.trainer.session import Session, due
from tandem.trainer.steps import Plan, minibatches


class PPOTrainer:
    """The controller of one run.

    Args:
        config: the resolved config.
        plan: what follows from it (total steps, what to compute).
        launcher: made the roles, and ends or moves them.
        roles: the worker groups.
        sampling: how training responses are drawn.
        prompts: training prompts.
        evaluator: validation, or None without validation data.
        kl_controller: the coefficient of the KL in the reward.
        session: the run folder, its metrics and checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        launcher: Launcher,
        roles: Roles,
        sampling: SamplingParams,
        prompts: Prompts,
        evaluator: Evaluator | None,
        kl_controller: FixedKLController | AdaptiveKLController,
        session: Session,
    ) -> None:
        self.config = config
        self.plan = plan
        self.launcher = launcher
        self.roles = roles
        self.sampling = sampling
        self.prompts = prompts
        self.evaluator = evaluator
        self.kl = kl_controller
        self.session = session
        self.n = config.actor_rollout_ref.rollout.n
        self.dealer = Dealer()
        self.trust = TrustProbe(config.actor_rollout_ref.rollout.temperature, session.say)
        self._rollout_is_current = False
        self._done: tuple[int, dict[str, float]] = (0, {})

    def fit(self) -> None:
        """Runs to the last step, or to an interrupt, whose step is finished and saved first."""
        trainer = self.config.trainer
        with self.session as session:
            step = session.restore(self.load_state_dict, forget=not trainer.val_only)
            if self.evaluator and (trainer.val_only or (trainer.val_before_train and step == 0)):
                session.log(step, session.restored | self.validate(step) | session.timeline.take())
            self._forget_measures()
            session.finishes_steps = True
            stop = trainer.val_only
            while step < self.plan.total_steps and not stop:
                step += 1
                last = step == self.plan.total_steps
                with session.phase("step"):
                    metrics = self.step(step, self.prompts.next())
                metrics |= self._performance(metrics)
                if self.evaluator and due(trainer.test_freq, step, last):
                    with session.phase("testing"):  # after the step's own observations were taken
                        metrics |= self.validate(step)
                stop = session.interrupted  # read once: an interrupt after this is for the next step
                if due(trainer.save_freq, step, last) or stop:
                    self._save(step, metrics)
                session.log(step, metrics | session.timeline.take())
                session.check_save()
                self._done = step, metrics
                self.at_step_boundary(step)

    def step(self, step: int, prompts: BatchFuture) -> dict[str, float]:
        """One iteration of the algorithm.

        Args:
            step: its number, from 1.
            prompts: `train_batch_size` prompts.

        Returns:
            its metrics.
        """
        roles, plan = self.roles, self.plan

        self._update_rollout()
        samples, scores = roles.generate(prompts, self.n, self.sampling, self.dealer)

        learns = step > self.config.trainer.critic_warmup
        columns = [scores]  # none of them needs another
        if plan.recompute_old or not learns:  # else the update itself compares them with the rollout's
            columns.append(roles.actor.compute_log_prob(samples))
        if roles.reference:
            columns.append(roles.reference.compute_ref_log_prob(samples))
        if roles.critic:
            columns.append(roles.critic.compute_values(samples))
        batch = samples.union(*columns)
        batch = batch.union(roles.batch.compute_advantages(batch, self.kl_coef))

        updates: list[tuple[str, Future[Metrics]]] = []
        if roles.critic:
            for mini in minibatches(batch, len(samples), plan.critic, step):
                updates.append(("critic", roles.critic.update_critic(mini)))
        if learns:
            for mini in minibatches(batch, len(samples), plan.actor, step):
                updates.append(("actor", roles.actor.update_actor(mini)))
            self._rollout_is_current = False

        metrics = self._measure(step, batch, updates)
        self.dealer.learn(prompts.index, samples.index)
        if self.config.algorithm.use_kl_in_reward:
            metrics["actor/kl_coef"] = self.kl.value
            self.kl.update(metrics["actor/kl_in_reward"], n_steps=plan.batch_samples)
        return metrics

    @property
    def kl_coef(self) -> float:
        """The weight of the KL penalty in the reward."""
        return self.kl.value if self.config.algorithm.use_kl_in_reward else 0.0

    def validate(self, step: int) -> dict[str, float]:
        """The validation's metrics."""
        assert self.evaluator is not None
        self._update_rollout()
        metrics = self.evaluator.run(step, self.roles)
        self._forget_measures()
        return metrics

    def _save(self, step: int, metrics: dict[str, float], *, wait: bool = False) -> Path:
        """A checkpoint; its folder. See `Session.save`."""
        path = self.session.save(step, self.state_dict(), metrics, wait=wait)
        self._forget_measures()
        return path

    def _forget_measures(self) -> None:
        """What workers counted and timed outside of steps, such as loading models, is charged to none."""
        self.roles.take_observed()
        self.roles.take_timings()
        self.roles.take_usage(elapsed_s=1.0)
        self.launcher.backend.take_traffic()

    def _update_rollout(self) -> None:
        if not self._rollout_is_current:
            self.roles.sync_rollout()
            self._rollout_is_current = True

    def _measure(
        self, step: int, batch: BatchFuture, updates: list[tuple[str, Future[Metrics]]]
    ) -> dict[str, float]:
        """What is reported of a step, once all of it has been done."""
        roles = self.roles
        written = roles.batch.write_samples(step, batch) if self.session.writes_samples(step) else None
        measured: Future[Metrics] = roles.batch.measure(batch)
        learnt = [prefixed(role, future.get()) for role, future in updates]
        metrics = Metrics.merged([measured.get(), *learnt, roles.take_observed()]).to_floats()
        metrics = self.trust.read(metrics, self.sampling)
        if written is not None:
            written.get()
        metrics["training/epoch"] = self.prompts.epoch
        if "actor/kl_in_reward" in metrics:
            metrics.setdefault("actor/kl", metrics["actor/kl_in_reward"])
        return metrics

    def _performance(self, metrics: dict[str, float]) -> dict[str, float]:
        """Seconds, rates, and how the step's time and bytes were spent, by role."""
        roles = self.roles
        seconds = self.session.timeline.take() | roles.take_timings()
        devices = {"actor": roles.actor.world_size, "rollout": roles.rollout.world_size}
        return (
            throughput(seconds, metrics, self.plan, devices)
            | roles.take_usage(seconds["timing/step"])
            | self.launcher.backend.take_traffic()
        )

    def at_step_boundary(self, step: int) -> None:
        """Called after each step, when all of it has been done and reported; does nothing. A subclass may
        call `reallocate` here."""

    def reallocate(self, placement: Placement) -> None:
        """Moves the roles to other processes, between two steps: what they have learnt goes through a
        checkpoint of the step just done, and training goes on as if nothing had happened.

        Args:
            placement: where each role is from now on.

        Raises:
            ConfigError: there are no such processes. The run has ended then, and resumes from the
                checkpoint.
        """
        step, metrics = self._done
        path = self._save(step, metrics, wait=True)
        self.roles = self.launcher.move(self.roles, placement, self.plan)
        self.session.members = self.roles.members
        self.session.load_members(path)
        self._forget_measures()
        self._rollout_is_current = False

    def shutdown(self) -> None:
        """Ends all workers."""
        self.launcher.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """The controller's own state; the models' is their workers'."""
        return {"loader": self.prompts.state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["loader"])
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
