"""Rules that must hold in every step of every run, and the meaning of a broken rule."""

from __future__ import annotations

from tandem.watch.batches import CHECK
from tandem.watch.checks import Check, Facts, Numbers, Row, findings

PROMPTS_USED = "training/prompts_used"
_OPPOSED = -0.5
_TOLERANCE = 1e-3

BROKEN = {
    "mixed_groups": "{0:.0f} samples are in a group of responses to another prompt: rows and uids no longer "
    "match. Remedy: keep uid, tokens and scores of a sample in one row whenever you reorder a batch",
    "repeated": "{0:.0f} samples of this step are in the batch twice. Remedy: check the code that joins or "
    "repeats batches, and whether the sampler draws a prompt twice",
    "foreign_scores": "{0:.0f} samples have a score that was computed for another sample. Remedy: return "
    "scores in the order of the samples",
    "late_mask": "in {0:.0f} samples, tokens that the policy generated are outside the response mask: the "
    "mask starts too late or ends too early. Remedy: set response_mask to true exactly where the engine has "
    "log-probs",
    "early_mask": "in {0:.0f} samples, the response mask starts at a token that the engine did not generate, "
    "because it has no log-prob: the mask starts one token too early. Remedy: set response_mask to true "
    "exactly where the engine has log-probs",
    "two_begins": "{0:.0f} prompts start with two begin-of-text tokens. Remedy: the chat template already "
    "writes one, so encode its text with add_special_tokens=false",
    "ended_prompts": "{0:.0f} prompts end with a token that ends a text or a turn, so the model is not asked "
    "for a response. Remedy: apply the chat template with add_generation_prompt=true, and add no end token "
    "to prompts",
    "padded_prompts": "{0:.0f} prompts contain padding tokens. Remedy: pass token ids without padding",
    "run_on": "{0:.0f} responses continue after a token that ends a turn or a text, because the engine does "
    "not stop at this token. Remedy: add it to eos_token_id in generation_config.json, or use the model's "
    "own tokenizer",
}
"""A dict from a count of samples to its meaning."""


def broken_rules(metrics: Row, before: Row, facts: Facts) -> dict[str, str]:
    """Return a dict from each rule that a step breaks to a sentence with the cause.

    Args:
        metrics: the metrics of the step, including the counts of workers with the prefix `CHECK`.
        before: the metrics of the previous step; empty for the first step of a run.
        facts: the facts of the run.
    """
    found = {
        name: sentence.format(metrics[CHECK + name])
        for name, sentence in BROKEN.items()
        if metrics.get(CHECK + name, 0.0) > 0
    }
    return found | dict(findings(RULES, metrics, before, facts))


def loss_scale(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that the token count of all micro-batches equals the divisor of the loss."""
    share = metrics.get(f"{CHECK}token_share", 1.0)
    return None if abs(share - 1) <= _TOLERANCE else (share,)


def opposed(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that samples with a higher score than their group's mean have a higher advantage too."""
    correlation = metrics.get(f"{CHECK}advantage_correlation", 0.0)
    return None if correlation >= _OPPOSED else (correlation,)


def _learnt(row: Row) -> bool:
    return row.get("actor/lr", 0.0) > 0 and row.get("actor/grad_norm", 0.0) > 0


def unmoved(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that an update with a gradient and a learning rate changes weights."""
    updates = metrics.get(f"{CHECK}unmoved_updates", 0.0)
    return (updates,) if updates and _learnt(before) else None


def same_ratio(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that the first update of a step changes the policy, so that later ratios differ from 1."""
    exact = metrics.get("actor/ppo_kl") == 0 and metrics.get("actor/clip_fraction") == 0
    compared = facts.recompute_old and facts.updates > 1
    return (facts.updates,) if compared and exact and _learnt(metrics) else None


def same_reference(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that a policy that has changed differs from its reference."""
    moved = metrics.get(f"{CHECK}moving_updates", 0.0) > 0 and _learnt(before)
    same = metrics.get("actor/kl") == 0 and "actor/reference_step" not in metrics
    return () if moved and same else None


def negative_kl(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that KL estimates that are positive for every token have a positive mean."""
    kl = metrics.get("actor/kl", 0.0)
    return None if not facts.kl_is_positive or kl >= -_TOLERANCE else (kl,)


def no_learning_rate(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that a configured learning rate is above zero, at the latest after a first warm-up step."""
    return () if facts.learns and metrics.get("actor/lr") == before.get("actor/lr") == 0 else None


def lost_prompts(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Check that a step continues in the data where the previous step, perhaps of another process, ended."""
    used, was = metrics.get(PROMPTS_USED), before.get(PROMPTS_USED)
    if used is None or was is None or "sampling/gen_batches" in metrics:
        return None
    return None if 0 <= used - was < 2 * facts.prompts else (used, was, facts.prompts)


RULES: dict[Check, str] = {
    loss_scale: "the loss is {0:.3g} times as large as it should be: micro-batches or ranks divide by their "
    "own number of tokens. Remedy: divide by the number of tokens of the whole mini-batch over all ranks",
    opposed: "advantages contradict rewards (their correlation within groups is {0:.2f}): better responses "
    "become less likely. Remedy: look for a wrong sign in the advantage estimator, or for a penalty that is "
    "larger than the reward",
    unmoved: "{0:.0f} updates changed no weight, although the gradient and the learning rate are not zero. "
    "Remedy: pass the parameters that the model uses to the optimizer. With fsdp_config.model_dtype=bf16, "
    "steps below the resolution of a weight are lost; fp32 keeps them",
    same_ratio: "all {0} updates of a step had a ratio of exactly 1: the old log-probs are recomputed from "
    "the policy that is being updated. Remedy: compute them once, before the first update of a step",
    same_reference: "the policy has changed, but its KL to the reference is exactly zero: the reference is "
    "trained too, or it is the policy itself. Remedy: give the reference its own weights that are never "
    "updated",
    negative_kl: "the KL to the reference is {0:.2g}, but this estimate cannot be negative: a sign or a "
    "ratio is inverted. Remedy: k3 is r - 1 - log r with r = p_reference / p_policy",
    no_learning_rate: "the learning rate has been zero for two steps, although the config sets it higher: "
    "nothing is learned. Remedy: check optim.lr_warmup_steps, lr_warmup_steps_ratio and "
    "total_training_steps, which determine the schedule",
    lost_prompts: "this step ends after {0:.0f} prompts of the data, and the previous step ended after "
    "{1:.0f}, with {2} prompts per step: a resume has skipped prompts or repeated some. Remedy: save the "
    "position of the data that was learned from, not of the data that was read in advance",
}
"""A dict from rule to the meaning of a broken rule, with placeholders for its numbers."""
