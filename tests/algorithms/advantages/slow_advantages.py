"""Every advantage estimator from its equation, in float64. No returns means that they are the advantages."""

import math
from typing import NamedTuple

import numpy as np
import torch

from tests.algorithms.batches import responses, whitened


def floats(columns, *names):
    return [columns[name].tolist() for name in names]


def zeros(columns):
    return torch.zeros(len(columns["response_mask"]), dtype=torch.float64)


def to_come(columns, gamma=1.0):
    """Return the discounted rewards from each response token on."""
    (rewards,), out = floats(columns, "token_level_rewards"), zeros(columns)
    for tokens in responses(columns):
        running = 0.0
        for t in reversed(tokens):
            out[t] = running = rewards[t] + gamma * running
    return out


def reinforce_plus_plus(columns, gamma):
    returns = to_come(columns, gamma)
    return whitened(returns, columns["response_mask"]), returns


def remax(columns):
    returns, (baselines,) = to_come(columns), floats(columns, "reward_baselines")
    advantages = returns.clone()
    for tokens, baseline in zip(responses(columns), baselines, strict=True):
        advantages[tokens] -= baseline
    return advantages, returns


def gae(columns, gamma, lam):
    (rewards, values), out = floats(columns, "token_level_rewards", "values"), zeros(columns)
    for tokens in responses(columns):
        next_value = next_advantage = 0.0
        for t in reversed(tokens):
            delta = rewards[t] + gamma * next_value - values[t]
            out[t] = next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
    mask = columns["response_mask"]
    return whitened(out, mask), torch.where(mask, out + columns["values"], 0)


def vtrace(columns, gamma=1.0, lam=1.0, rho_bar=1.0, c_bar=1.0):
    # v_t = V_t + rho_t delta_t + gamma lam c_t (v_{t+1} - V_{t+1}); A_t = rho_t (r_t + gamma v_{t+1} - V_t)
    rewards, values, old, rollout = floats(
        columns, "token_level_rewards", "values", "old_log_probs", "rollout_log_probs"
    )
    advantages, targets = zeros(columns), zeros(columns)
    for tokens in responses(columns):
        value = target = 0.0  # of the next token
        for t in reversed(tokens):
            ratio = math.exp(min(max(old[t] - rollout[t], -20), 20))
            rho, c = min(rho_bar, ratio), min(c_bar, ratio)
            advantages[t] = rho * (rewards[t] + gamma * target - values[t])
            delta = rho * (rewards[t] + gamma * value - values[t])
            target = values[t] + delta + gamma * lam * c * (target - value)
            value, targets[t] = values[t], target
    return advantages, targets


def optimal_token_baseline(columns, handle_zero_tail, compact=False):
    """Loop over the group for each token; `compact` counts positions in response tokens alone."""
    names = ("token_level_rewards", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "group")
    rewards, logs, squares, rho, group = floats(columns, *names)
    found = []  # for each sequence, a dict: position in the response -> (token, G, W)
    for tokens in responses(columns):
        energy, table = 0.0, {}
        for n, t in enumerate(tokens):
            energy += (1 - 2 * math.exp(logs[t]) + squares[t]) * rho[t] ** 2
            table[n if compact else t - tokens[0]] = (t, sum(rewards[s] for s in tokens[n:]), energy)
        found.append(table)
    advantages, returns = zeros(columns), zeros(columns)
    for i, table in enumerate(found):
        mine = [other for j, other in enumerate(found) if group[j] == group[i] and other]
        for place, (t, total, _) in table.items():
            there = [other[place] for other in mine if place in other]
            baseline = sum(g * w for _, g, w in there) / (sum(w for _, _, w in there) + 1e-8)
            if len(mine) == 1 or (handle_zero_tail and len(there) == 1):
                baseline = 0.0
            returns[t], advantages[t] = total, total - baseline
    return advantages, returns


def tir_optimal_token_baseline(columns, handle_zero_tail):
    return optimal_token_baseline(columns, handle_zero_tail, compact=True)


class Sample(NamedTuple):
    score: float
    length: int


def over_sequences(columns, of_scores):
    """Give every token of a response its sequence's number, as `of_scores(samples, groups)` returns them."""
    (rewards, groups), out = floats(columns, "token_level_rewards", "group"), zeros(columns)
    tokens = responses(columns)
    samples = [Sample(sum(rewards[t] for t in mine), len(mine)) for mine in tokens]
    for mine, advantage in zip(tokens, of_scores(samples, groups), strict=True):
        out[mine] = float(advantage)
    return out


def by_group(rule):
    """Turn a rule for one sample, its group's other samples and options into an estimator."""

    def numbers(samples, groups, **options):
        members = [[j for j, other in enumerate(groups) if other == each] for each in groups]
        return [
            rule(own, [samples[j] for j in members[i] if j != i], **options) for i, own in enumerate(samples)
        ]

    def estimator(columns, **options):
        return over_sequences(columns, lambda *given: numbers(*given, **options)), None

    estimator.numbers = numbers
    return estimator


def scores(own, others):
    return [own.score, *(other.score for other in others)]


def deviation(values):
    return (np.std(values, ddof=1) if len(values) > 1 else 1.0) + 1e-6


@by_group
def dr_grpo(own, others):
    return own.score - np.mean(scores(own, others)) if others else own.score


@by_group
def rloo(own, others):
    return own.score - np.mean([other.score for other in others]) if others else own.score


@by_group
def grpo(own, others, norm_adv_by_std_in_grpo):
    lead = own.score - np.mean(scores(own, others)) if others else own.score
    return lead / deviation(scores(own, others)) if norm_adv_by_std_in_grpo else lead


@by_group
def grpo_passk(own, others, norm_adv_by_std_in_grpo):
    lead = max(own.score - max(other.score for other in others), 0.0) if others else own.score
    return lead / deviation(scores(own, others)) if norm_adv_by_std_in_grpo else lead


@by_group
def opo(own, others):
    tokens = own.length + sum(other.length for other in others)
    weighted = sum(each.length * each.score for each in (own, *others))
    return own.score - weighted / tokens if others and tokens else own.score


@by_group
def maxrl(own, others):
    rate = np.mean(scores(own, others))
    return (own.score - rate) / (rate + 1e-6) if others else own.score


def gpg(columns, f_norm):
    def numbers(samples, groups):
        plain = dr_grpo.numbers(samples, groups)
        teaching = {group for group, each in zip(groups, plain, strict=True) if each != 0}
        count = sum(group in teaching for group in groups)
        return [len(samples) / max(count, 1) * each / f_norm for each in plain]

    return over_sequences(columns, numbers), None


def reinforce_plus_plus_baseline(columns):
    return whitened(dr_grpo(columns)[0], columns["response_mask"]), None


def gdpo(columns, norm_adv_by_std_in_grpo, gdpo_reward_weights):
    components, groups = floats(columns, "reward_components", "group")
    weights = gdpo_reward_weights or (1.0, 1.0, 1.0)
    options = {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    parts = [
        grpo.numbers([Sample(scores[k], 1) for scores in components], groups, **options) for k in range(3)
    ]
    summed = zeros(columns)
    for i, tokens in enumerate(responses(columns)):
        summed[tokens] = float(sum(weight * part[i] for weight, part in zip(weights, parts, strict=True)))
    return whitened(summed, columns["response_mask"]), None
