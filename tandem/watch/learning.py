"""Warnings about learning: what the history of a run's metrics says is wrong, and what to do.

A check is a pure function of the history and a window; it returns the numbers of its sentence in `CHECKS`, or
None where all is well.
Means and medians are over the window, so that a warning comes some ten steps after its cause, and no single
step brings one. A task counts as solved once the mean reward is within a tenth of the way from the greatest
to the least score seen: that all responses agree, or that nothing is uncertain, is then as it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median

from tandem.watch.checks import Check, Numbers

History = Mapping[str, Sequence[float]]
"""For each metric of `READ` its finite values, in the order of the steps that had one."""
WINDOW, PROMPTS = 10, 64
"""A warning rests on at least so many steps and so many prompts."""
ALIKE = 0.95
CUT, RISEN = 0.95, 0.1
ROSE, FELL = 0.2, 0.1
COLLAPSED, SMALL_ENTROPY = 0.1, 0.05
STEPS_WITHOUT_GRADIENT = 5
FAR = 1.0
CLIPPED, MOVED, FAR_MOVED = 0.4, 0.05, 0.25


def reward_constant(history: History, window: int) -> Numbers:
    """No score has differed from any other since the run began."""
    low, high = history["reward/min"], history["reward/max"]
    return None if len(low) < window or min(low) != max(high) else (len(low), low[0])


def groups_alike(history: History, window: int) -> Numbers:
    """Nearly all prompts have responses that are all worth the same, in a task that is not solved. Above a
    share of `ALIKE` at most one prompt in twenty teaches."""
    shares = history["reward/zero_std_share"][-window:]
    alike = len(shares) >= window and fmean(shares) >= ALIKE and _range(history) != 0
    return (window, fmean(shares)) if alike and not _solved(history, window) else None


def reward_fell(history: History, window: int) -> Numbers:
    """The reward was well above the least score, and no longer is.

    A reward that once was at a fifth (`ROSE`) of the way from the usual least score of a step to the usual
    greatest has fallen to nothing when it is at a tenth (`FELL`) of that rise. Of 64 prompts with a fifth
    right answers, chance leaves no more than two right less than once in ten thousand times.
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
    """Nearly all responses (`CUT`) end at the limit, and the reward has not risen all the same. Where answers
    are of one length that is as it should be: there the reward rises, by a tenth (`RISEN`) of the range of
    scores."""
    shares, rewards = history["response_length/clip_ratio"][-window:], history["reward/mean"]
    if min(2 * len(shares), len(rewards)) < 2 * window or fmean(shares) < CUT or _solved(history, window):
        return None
    if fmean(rewards[-window:]) - fmean(rewards[:window]) > RISEN * _range(history):
        return None
    return window, fmean(shares)


def entropy_collapsed(history: History, window: int) -> Numbers:
    """The policy has become certain, is not right, and does not get better. An entropy has collapsed when it
    is a tenth (`COLLAPSED`) of the first steps' and below `SMALL_ENTROPY` nats a token: then nearly every
    token is certain (Cui et al. 2025, arXiv 2505.22617)."""
    entropies, rewards = history["actor/entropy"], history["reward/mean"]
    if min(len(entropies), len(rewards)) < 2 * window or _solved(history, window):
        return None
    first, now = fmean(entropies[:window]), fmean(entropies[-window:])
    gained = fmean(rewards[-window:]) - fmean(rewards[-2 * window : -window])
    if now > min(COLLAPSED * first, SMALL_ENTROPY) or gained > 0.01 * _range(history):
        return None
    return first, now


def gradient_zero(history: History, window: int) -> Numbers:
    """The gradient of several steps is exactly zero although there was something to learn."""
    for role in ("actor", "sft", "rm"):
        norms = history[f"{role}/grad_norm"][-STEPS_WITHOUT_GRADIENT:]
        nothing = role == "actor" and (_nothing_to_learn(history) or _solved(history, STEPS_WITHOUT_GRADIENT))
        if len(norms) == STEPS_WITHOUT_GRADIENT and not any(norms) and not nothing:
            return role, STEPS_WITHOUT_GRADIENT
    return None


def kl_runs_away(history: History, window: int) -> Numbers:
    """The policy is far from the reference. At `FAR`, 1 nat a token, it finds its own tokens e times as
    likely as the reference does."""
    kls = history["actor/kl"][-window:]
    return None if len(kls) < window or median(kls) <= FAR else (window, median(kls))


def updates_too_far(history: History, window: int) -> Numbers:
    """The updates of a step leave the policy that wrote its samples far behind.

    They have gone too far when they clip 40% (`CLIPPED`) of the tokens and move the policy by 0.05 nats a
    token (`MOVED`): PPO's usual early stop is at 0.01 to 0.03. Narrow bounds, such as GSPO's, clip as many
    while it hardly moves, and some losses clip nothing: for these 0.25 nats (`FAR_MOVED`) are too far.
    """
    moves, clips = history["actor/ppo_kl"][-window:], history["actor/clip_fraction"][-window:]
    if len(moves) < window:
        return None
    moved, clipped = median(map(abs, moves)), median(clips or [0.0])
    if not (moved > FAR_MOVED or (moved > MOVED and clipped > CLIPPED)):
        return None
    return moved, clipped


CHECKS: dict[Check, str] = {
    reward_constant: "every response of the first {0} steps was scored {1:g}: there is nothing to learn "
    "from. Look at responses (tandem samples RUN) and at what the reward function makes of them; if they "
    "are fair, begin with easier prompts, a model that is sometimes right, or a reward that gives parts of "
    "the score",
    groups_alike: "in the last {0} steps {1:.0%} of the prompts had responses that were all worth the same: "
    "their advantage is zero and they teach nothing. More responses to a prompt "
    "(actor_rollout_ref.rollout.n), prompts that are sometimes right (algorithm.filter_groups.enable=true "
    "leaves out the others), or a higher actor_rollout_ref.rollout.temperature bring differences",
    reward_fell: "the reward was {0:.3g} and has fallen to {1:.3g}. See whether the reward function still "
    "works (tandem samples RUN); if it does, go back to a checkpoint from before "
    "(trainer.resume_mode=resume_path) with a lower actor_rollout_ref.actor.optim.lr, fewer updates a step, "
    "or a KL term (actor_rollout_ref.actor.use_kl_loss=true)",
    all_cut: "in the last {0} steps {1:.0%} of the responses were cut at the limit. Raise "
    "data.max_response_length; if they never end, see whether the prompt's chat template and the "
    "end-of-text token are the model's; or punish length (reward_model.overlong_buffer.enable=true)",
    entropy_collapsed: "the entropy has fallen from {0:.2g} to {1:.2g} nats a token and the reward does not "
    "rise: the policy tries nothing new. From a checkpoint before the fall, raise "
    "actor_rollout_ref.actor.clip_ratio_high (0.28), hold the entropy "
    "(actor_rollout_ref.actor.adaptive_entropy.enabled=true), or lower actor_rollout_ref.actor.optim.lr",
    gradient_zero: "{0}/grad_norm was zero in the last {1} steps although there was something to learn. "
    "Either no parameter is trained (LoRA's target_modules), or every token is masked or clipped "
    "(algorithm.rollout_correction, the loss's clip_ratio), or the advantages are zero, as pass@k's are "
    "once each prompt has two best responses",
    kl_runs_away: "over the last {0} steps the policy was {1:.2g} nats a token from the reference. Raise "
    "the KL's coefficient (actor_rollout_ref.actor.kl_loss_coef, algorithm.kl_ctrl.kl_coef), or lower "
    "actor_rollout_ref.actor.optim.lr",
    updates_too_far: "within a step the policy moves by {0:.2g} nats a token, and {1:.0%} of the tokens are "
    "clipped. Lower actor_rollout_ref.actor.optim.lr, or make fewer updates a step (a larger "
    "actor_rollout_ref.actor.ppo_mini_batch_size, fewer actor_rollout_ref.actor.ppo_epochs)",
}
"""What each check warns of, with its numbers."""


READ = frozenset(
    {
        *("reward/mean", "reward/min", "reward/max", "reward/zero_std_share", "response_length/clip_ratio"),
        *("actor/entropy", "actor/kl", "actor/ppo_kl", "actor/clip_fraction"),
        *("actor/grad_norm", "sft/grad_norm", "rm/grad_norm"),
    }
)
"""The metrics that checks look at."""


def _range(history: History) -> float:
    return max(history["reward/max"]) - min(history["reward/min"])


def _solved(history: History, window: int) -> bool:
    """Whether nearly all that can be had is had; not where no score differs."""
    span = _range(history) if history["reward/mean"] else 0.0
    return span > 0 and fmean(history["reward/mean"][-window:]) >= max(history["reward/max"]) - 0.1 * span


def _nothing_to_learn(history: History) -> bool:
    """Whether all scores were alike in the last steps; within each group, where groups are compared."""
    last = slice(-STEPS_WITHOUT_GRADIENT, None)
    shares = history["reward/zero_std_share"][last] or [
        float(low == high)
        for low, high in zip(history["reward/min"][last], history["reward/max"][last], strict=True)
    ]
    return all(share == 1 for share in shares)
