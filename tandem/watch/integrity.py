"""Rules that hold of every step whatever is learnt, and what it means where one is broken."""

from __future__ import annotations

from tandem.watch.batches import CHECK
from tandem.watch.checks import Check, Facts, Numbers, Row, findings

PROMPTS_USED = "training/prompts_used"
_OPPOSED = -0.5
_TOLERANCE = 1e-3

BROKEN = {
    "mixed_groups": "{0:.0f} samples are in a group of responses to another prompt: rows and uids have come "
    "apart. Remedy: keep uid, tokens and scores of a sample in one row whenever a batch is reordered",
    "repeated": "{0:.0f} samples of this step are in the batch twice. Remedy: look at what joins or repeats "
    "batches, and at a sampler that draws a prompt twice",
    "foreign_scores": "{0:.0f} samples have a score that was given to another sample. Remedy: return scores "
    "in the order of the samples",
    "late_mask": "in {0:.0f} samples tokens that the policy wrote are outside the response mask: it begins "
    "too late or ends too early. Remedy: response_mask is true exactly where the engine has log-probs",
    "early_mask": "in {0:.0f} samples the response mask begins at a token that the engine did not write, "
    "for it has no log-prob: the mask begins one token too early. Remedy: response_mask is true exactly "
    "where the engine has log-probs",
    "two_begins": "{0:.0f} prompts begin with two begin-of-text tokens. Remedy: the chat template writes one "
    "already; encode its text with add_special_tokens=false",
    "ended_prompts": "{0:.0f} prompts end with a token that ends a text or a turn, so that nothing asks for "
    "an answer. Remedy: apply the chat template with add_generation_prompt=true, and add no end token to "
    "prompts",
    "padded_prompts": "{0:.0f} prompts hold padding tokens. Remedy: pass ragged token ids, without padding",
    "run_on": "{0:.0f} responses go on after a token that ends a turn or a text and is not among the "
    "engine's stop tokens. Remedy: put it into generation_config.json (eos_token_id), or use the tokenizer "
    "of the model",
}
"""What a count of samples under this name means."""


def broken_rules(metrics: Row, before: Row, facts: Facts) -> dict[str, str]:
    """The rules that a step breaks, each with a sentence that says the cause.

    Args:
        metrics: of the step, with what workers counted under `CHECK`.
        before: of the step before; empty at a run's first.
    """
    found = {
        name: sentence.format(metrics[CHECK + name])
        for name, sentence in BROKEN.items()
        if metrics.get(CHECK + name, 0.0) > 0
    }
    return found | dict(findings(RULES, metrics, before, facts))


def loss_scale(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """The tokens of all micro-batches are those that the loss is divided by."""
    share = metrics.get(f"{CHECK}token_share", 1.0)
    return None if abs(share - 1) <= _TOLERANCE else (share,)


def opposed(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """What scores more than the rest of its group has the greater advantage."""
    correlation = metrics.get(f"{CHECK}advantage_correlation", 0.0)
    return None if correlation >= _OPPOSED else (correlation,)


def _learnt(row: Row) -> bool:
    return row.get("actor/lr", 0.0) > 0 and row.get("actor/grad_norm", 0.0) > 0


def unmoved(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """An update with a gradient and a learning rate changes weights."""
    updates = metrics.get(f"{CHECK}unmoved_updates", 0.0)
    return (updates,) if updates and _learnt(before) else None


def same_ratio(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """After a first update of a step the policy is no longer the one that wrote its samples."""
    exact = metrics.get("actor/ppo_kl") == 0 and metrics.get("actor/clip_fraction") == 0
    compared = facts.recompute_old and facts.updates > 1
    return (facts.updates,) if compared and exact and _learnt(metrics) else None


def same_reference(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """A policy that has moved is no longer its reference."""
    moved = metrics.get(f"{CHECK}moving_updates", 0.0) > 0 and _learnt(before)
    same = metrics.get("actor/kl") == 0 and "actor/reference_step" not in metrics
    return () if moved and same else None


def negative_kl(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """Estimates of the KL that are positive for every token have a positive mean."""
    kl = metrics.get("actor/kl", 0.0)
    return None if not facts.kl_is_positive or kl >= -_TOLERANCE else (kl,)


def no_learning_rate(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """A learning rate that is asked for comes to something, after a first step of warm-up at most."""
    return () if facts.learns and metrics.get("actor/lr") == before.get("actor/lr") == 0 else None


def lost_prompts(metrics: Row, before: Row, facts: Facts) -> Numbers:
    """A step goes on in the data where the one before it, in this process or another, had come to."""
    used, was = metrics.get(PROMPTS_USED), before.get(PROMPTS_USED)
    if used is None or was is None or "sampling/gen_batches" in metrics:
        return None
    return None if 0 <= used - was < 2 * facts.prompts else (used, was, facts.prompts)


RULES: dict[Check, str] = {
    loss_scale: "the loss is {0:.3g} times as large as it should be: micro-batches, or ranks, are divided "
    "by their own number of tokens. Remedy: divide by the counts of the whole mini-batch over all ranks",
    opposed: "advantages run against rewards (correlation within groups {0:.2f}): better responses become "
    "less likely. Remedy: look for a changed sign in the advantage estimator, or a penalty that outweighs "
    "the reward",
    unmoved: "{0:.0f} updates changed no weight, although the gradient and the learning rate are not zero. "
    "Remedy: give the optimizer the parameters that the model uses; with fsdp_config.model_dtype=bf16 steps "
    "below a weight's resolution are lost, fp32 keeps them",
    same_ratio: "all {0} updates of a step had a ratio of exactly 1: the old log-probs are taken anew from "
    "the policy that is being updated. Remedy: compute them once, before the first update of a step",
    same_reference: "the policy has moved and its KL to the reference is exactly zero: the reference is "
    "trained along, or is the policy itself. Remedy: give the reference weights of its own that nothing "
    "updates",
    negative_kl: "the KL to the reference is {0:.2g}, and its estimate cannot be negative: a sign or a "
    "ratio is turned round. Remedy: k3 is r - 1 - log r with r = p_reference / p_policy",
    no_learning_rate: "the learning rate has been zero for two steps, although it is set to more: nothing "
    "is learnt. Remedy: look at optim.lr_warmup_steps, lr_warmup_steps_ratio and total_training_steps, from "
    "which the schedule follows",
    lost_prompts: "this step ends after {0:.0f} prompts of the data, and the step before it ended after "
    "{1:.0f}, with {2} to a step: a resume has left prompts out, or has gone back. Remedy: save the "
    "position of the data that were learnt from, not of those that were read ahead",
}
"""What it means where a rule is broken, with its numbers."""
