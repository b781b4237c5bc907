"""Warnings about learning, from the history of a run's metrics.

A check is a pure function of the history and a window. It returns the numbers for its sentence in `CHECKS`,
or None without a problem.

Means and medians are taken over the window. A warning therefore appears about ten steps after its cause, and
a single step never causes a warning. A task counts as solved if the mean reward is close to the highest score
so far: within a tenth of the range of scores. In a solved task it is normal that all responses have the same
reward, or that the policy is certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median

from tandem.watch.checks import Check, Numbers

History = Mapping[str, Sequence[float]]
"""A dict from each metric of `READ` to its finite values, in the order of the steps."""
WINDOW, PROMPTS = 10, 64
"""The minimum numbers of steps (`WINDOW`) and of prompts (`PROMPTS`) for a warning."""
ALIKE = 0.95
CUT, RISEN = 0.95, 0.1
ROSE, FELL = 0.2, 0.1
COLLAPSED, SMALL_ENTROPY = 0.1, 0.05
STEPS_WITHOUT_GRADIENT = 5
FAR = 1.0
CLIPPED, MOVED, FAR_MOVED = 0.4, 0.05, 0.25
IDLE = 0.25


def reward_constant(history: History, window: int) -> Numbers:
    """Detect that all scores since the start of the run are equal."""
    low, high = history["reward/min"], history["reward/max"]
    return None if len(low) < window or min(low) != max(high) else (len(low), low[0])


def groups_alike(history: History, window: int) -> Numbers:
    """Detect that the responses to nearly every prompt have equal rewards, in a task that is not solved.

    The limit is the fraction `ALIKE` of the prompts. Above it, the policy can learn from at most one prompt
    in twenty.
    """
    shares = history["reward/zero_std_share"][-window:]
    alike = len(shares) >= window and fmean(shares) >= ALIKE and _range(history) != 0
    return (window, fmean(shares)) if alike and not _solved(history, window) else None


def reward_fell(history: History, window: int) -> Numbers:
    """Detect that the reward was well above the lowest score, and has fallen back to it.

    The usual lowest and highest scores are medians over the steps. The reward must once have reached a fifth
    (`ROSE`) of the range between them, and must now be at most a tenth (`FELL`) of that rise above the
    lowest. If a fifth of 64 prompts are answered correctly, chance leaves at most two correct less than once
    in ten thousand times.
    """
    means = history["reward/mean"]
    if len(means) < 2 * window:
        return None
    low, high = median(history["reward/min"]), median(history["reward/max"])
    sums = list(accumulate(means, initial=0.0))
    peak = max((sums[i + window] - sums[i]) / window for i in range(len(means) - 2 * window + 1))
    now = fmean(means[-window:])
    if high <= low or peak - low < ROSE * (high - low) or now - low > FELL * (peak - low):
        return None
    return peak, now


def all_cut(history: History, window: int) -> Numbers:
    """Detect that nearly all responses (`CUT`) end at the length limit while the reward has not risen.

    In a task whose responses all have the same length, ending at the limit is normal. The reward then rises,
    by at least a tenth (`RISEN`) of the range of scores.
    """
    shares, rewards = history["response_length/clip_ratio"][-window:], history["reward/mean"]
    if min(2 * len(shares), len(rewards)) < 2 * window or fmean(shares) < CUT or _solved(history, window):
        return None
    if fmean(rewards[-window:]) - fmean(rewards[:window]) > RISEN * _range(history):
        return None
    return window, fmean(shares)


def entropy_collapsed(history: History, window: int) -> Numbers:
    """Detect that the policy has become certain although its answers are wrong and do not improve.

    The entropy has collapsed if it is below a tenth (`COLLAPSED`) of the entropy in the first steps and below
    `SMALL_ENTROPY` nats per token. Nearly every token is then certain (Cui et al. 2025, arXiv 2505.22617).
    """
    entropies, rewards = history["actor/entropy"], history["reward/mean"]
    if min(len(entropies), len(rewards)) < 2 * window or _solved(history, window):
        return None
    first, now = fmean(entropies[:window]), fmean(entropies[-window:])
    gained = fmean(rewards[-window:]) - fmean(rewards[-2 * window : -window])
    if now > min(COLLAPSED * first, SMALL_ENTROPY) or gained > 0.01 * _range(history):
        return None
    return first, now


def gradient_zero(history: History, window: int) -> Numbers:
    """Detect that the gradient of several steps is exactly zero although rewards differed."""
    for role in ("actor", "sft", "rm"):
        norms = history[f"{role}/grad_norm"][-STEPS_WITHOUT_GRADIENT:]
        nothing = role == "actor" and (_nothing_to_learn(history) or _solved(history, STEPS_WITHOUT_GRADIENT))
        if len(norms) == STEPS_WITHOUT_GRADIENT and not any(norms) and not nothing:
            return role, STEPS_WITHOUT_GRADIENT
    return None


def kl_runs_away(history: History, window: int) -> Numbers:
    """Detect that the policy is far from the reference.

    At `FAR`, 1 nat per token, the policy considers its own tokens e times as likely as the reference does.
    """
    kls = history["actor/kl"][-window:]
    return None if len(kls) < window or median(kls) <= FAR else (window, median(kls))


def updates_too_far(history: History, window: int) -> Numbers:
    """Detect that the updates of a step move the policy too far from the policy that sampled.

    This is the case if the updates clip 40% (`CLIPPED`) of the tokens and move the policy by 0.05 nats per
    token (`MOVED`). PPO's usual early stop is at 0.01 to 0.03. Narrow clip ranges, such as GSPO's, clip as
    many tokens while the policy hardly moves, and some losses clip nothing. Therefore, a move of 0.25 nats
    (`FAR_MOVED`) alone is also too far.
    """
    moves, clips = history["actor/ppo_kl"][-window:], history["actor/clip_fraction"][-window:]
    if len(moves) < window:
        return None
    moved, clipped = median(map(abs, moves)), median(clips or [0.0])
    if not (moved > FAR_MOVED or (moved > MOVED and clipped > CLIPPED)):
        return None
    return moved, clipped


def experts_idle(history: History, window: int) -> Numbers:
    """Detect that a quarter (`IDLE`) more of a mixture's experts get no tokens than in the first steps."""
    shares = history["router/idle_experts"]
    if len(shares) < 2 * window:
        return None
    first, now = fmean(shares[:window]), fmean(shares[-window:])
    return (now, first) if now - first >= IDLE else None


CHECKS: dict[Check, str] = {
    reward_constant: "every response of the first {0} steps was scored {1:g}, so there is nothing to learn "
    "from. Look at the responses and their scores (tandem samples RUN). If the scores are right, start with "
    "easier prompts, a model that is sometimes right, or a reward that gives partial credit",
    groups_alike: "in the last {0} steps, {1:.0%} of the prompts had responses with identical rewards. Their "
    "advantage is zero, so they teach nothing. To get different rewards, generate more responses per prompt "
    "(actor_rollout_ref.rollout.n), keep only prompts that are sometimes answered correctly "
    "(algorithm.filter_groups.enable=true), or raise actor_rollout_ref.rollout.temperature",
    reward_fell: "the reward was {0:.3g} and has fallen to {1:.3g}. Check whether the reward function still "
    "works (tandem samples RUN). If it does, go back to an earlier checkpoint "
    "(trainer.resume_mode=resume_path) with a lower actor_rollout_ref.actor.optim.lr, fewer updates per "
    "step, or a KL term (actor_rollout_ref.actor.use_kl_loss=true)",
    all_cut: "in the last {0} steps, {1:.0%} of the responses were cut at the length limit. Raise "
    "data.max_response_length. If responses never end, check that the chat template and the end-of-text "
    "token are those of the model. Or penalize long responses (reward_model.overlong_buffer.enable=true)",
    entropy_collapsed: "the entropy has fallen from {0:.2g} to {1:.2g} nats per token and the reward does "
    "not rise: the policy no longer explores. Go back to a checkpoint before the fall, and raise "
    "actor_rollout_ref.actor.clip_ratio_high (0.28), keep the entropy at a target "
    "(actor_rollout_ref.actor.adaptive_entropy.enabled=true), or lower actor_rollout_ref.actor.optim.lr",
    gradient_zero: "{0}/grad_norm was zero in the last {1} steps, although there was something to learn. "
    "Either no parameter is trained (LoRA's target_modules), or every token is masked or clipped "
    "(algorithm.rollout_correction, the clip_ratio of the loss), or all advantages are zero, as those of "
    "pass@k are once each prompt has two best responses",
    kl_runs_away: "over the last {0} steps, the policy was {1:.2g} nats per token away from the reference. "
    "Raise the coefficient of the KL (actor_rollout_ref.actor.kl_loss_coef, algorithm.kl_ctrl.kl_coef), or "
    "lower actor_rollout_ref.actor.optim.lr",
    updates_too_far: "within a step, the policy moves by {0:.2g} nats per token, and {1:.0%} of the tokens "
    "are clipped. Lower actor_rollout_ref.actor.optim.lr, or make fewer updates per step (a larger "
    "actor_rollout_ref.actor.ppo_mini_batch_size, fewer actor_rollout_ref.actor.ppo_epochs)",
    experts_idle: "{0:.0%} of the experts get no token in an update, and {1:.0%} in the first steps: the "
    "routers choose ever fewer experts. Go back to an earlier checkpoint, and set "
    "actor_rollout_ref.model.mixture.router_aux_loss_coef, or lower actor_rollout_ref.actor.optim.lr",
}
"""A dict from check to its warning, with placeholders for the check's numbers."""


READ = frozenset(
    {
        *("reward/mean", "reward/min", "reward/max", "reward/zero_std_share", "response_length/clip_ratio"),
        *("actor/entropy", "actor/kl", "actor/ppo_kl", "actor/clip_fraction"),
        *("actor/grad_norm", "sft/grad_norm", "rm/grad_norm", "router/idle_experts"),
    }
)
"""The metrics that the checks read."""


def _range(history: History) -> float:
    return max(history["reward/max"]) - min(history["reward/min"])


def _solved(history: History, window: int) -> bool:
    """Return whether the mean reward is close to the highest score. False if all scores are the same."""
    span = _range(history) if history["reward/mean"] else 0.0
    return span > 0 and fmean(history["reward/mean"][-window:]) >= max(history["reward/max"]) - 0.1 * span


def _nothing_to_learn(history: History) -> bool:
    """Return whether all scores in the last steps were equal (within each group, if groups are compared)."""
    last = slice(-STEPS_WITHOUT_GRADIENT, None)
    shares = history["reward/zero_std_share"][last] or [
        float(low == high)
        for low, high in zip(history["reward/min"][last], history["reward/max"][last], strict=True)
    ]
    return all(share == 1 for share in shares)
