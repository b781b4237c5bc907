"""Every policy loss from its equations: the loss and slope of each token of a sequence, in floats."""

import math
from dataclasses import dataclass
from functools import wraps


@dataclass(frozen=True)
class Token:
    """A response token: current and old log-prob, advantage, selected or not, importance weight."""

    now: float
    old: float
    advantage: float
    selected: bool = False
    weight: float = 1.0

    @property
    def moved(self):
        return min(max(self.now - self.old, -20.0), 20.0)

    @property
    def ratio(self):
        return math.exp(self.moved)

    @property
    def ratio_slope(self):
        """The slope of the ratio with respect to the log-prob: the ratio itself, or 0 beyond the clamp."""
        return self.ratio if abs(self.now - self.old) <= 20 else 0.0


def by_token(function):
    """Turn a loss of one token into a loss of a sequence of independent tokens."""

    @wraps(function)
    def sequence(tokens, **options):
        found = [function(token, **options) for token in tokens]
        return [loss for loss, _ in found], [slope for _, slope in found]

    return sequence


def clipped(advantage, ratio, slope, low, high):
    """Return the loss and slope of PPO's clipped objective, the larger loss of both ratios."""
    within = min(max(ratio, 1 - low), 1 + high)
    if -advantage * ratio >= -advantage * within:
        return -advantage * ratio, -advantage * slope
    return -advantage * within, 0.0


@by_token
def vanilla(token, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0):
    loss, slope = clipped(token.advantage, token.ratio, token.ratio_slope, clip_ratio_low, clip_ratio_high)
    if token.advantage < 0 and loss > -clip_ratio_c * token.advantage:
        return -clip_ratio_c * token.advantage, 0.0
    return loss, slope


def gspo(tokens, clip_ratio_low=0.2, clip_ratio_high=0.2):
    mean = sum(token.now - token.old for token in tokens) / max(len(tokens), 1)
    ratio = math.exp(min(mean, 10.0))
    slope = ratio if mean <= 10 else 0.0
    found = [clipped(token.advantage, ratio, slope, clip_ratio_low, clip_ratio_high) for token in tokens]
    return [loss for loss, _ in found], [slope for _, slope in found]


def geo_mean(tokens, clip_ratio_low=0.2, clip_ratio_high=0.2):
    """Compute the geometric mean of w min(rho A, clip(rho) A) in logarithms, with the advantage's sign."""
    count = max(len(tokens), 1)
    logs, free = [], []
    for token in tokens:
        within = min(max(token.moved, -clip_ratio_low), clip_ratio_high)
        sign = (token.advantage > 0) - (token.advantage < 0)
        kept = sign * token.moved <= sign * within  # the unclipped product is the smaller one
        logs.append(0.0 if sign == 0 else token.moved if kept else within)
        free.append(float(kept and sign != 0 and abs(token.now - token.old) <= 20))
    advantage = sum(token.advantage for token in tokens) / count
    weight = math.prod(max(token.weight, 1e-10) ** (1 / count) for token in tokens)
    loss = -advantage * math.exp(sum(logs) / count) * weight
    return [loss] * len(tokens), [loss * f / count for f in free]


@by_token
def cispo(token, clip_ratio_low=0.2, clip_ratio_high=0.2):
    weight = min(max(token.ratio, 1 - clip_ratio_low), 1 + clip_ratio_high)
    return -weight * token.advantage * token.now, -weight * token.advantage


@by_token
def sapo(token, tau_pos=1.0, tau_neg=1.05):
    tau = tau_pos if token.advantage > 0 else tau_neg
    x = tau * (token.ratio - 1)
    gate = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    slope = 4 * gate * (1 - gate) * token.ratio_slope
    return -4 / tau * gate * token.advantage, -slope * token.advantage


@by_token
def clip_cov(token, clip_ratio_low=0.2, clip_ratio_high=0.2):
    loss, slope = clipped(token.advantage, token.ratio, token.ratio_slope, clip_ratio_low, clip_ratio_high)
    within = min(max(token.ratio, 1 - clip_ratio_low), 1 + clip_ratio_high)
    silenced = -token.advantage * within > -token.advantage * token.ratio
    return (0.0, 0.0) if token.selected and not silenced else (loss, slope)


@by_token
def kl_cov(token, ppo_kl_coef=0.1):
    difference = token.now - token.old
    pull = ppo_kl_coef if token.selected else 0.0
    loss, slope = -token.ratio * token.advantage, -token.ratio_slope * token.advantage
    return loss + pull * abs(difference), slope + pull * ((difference > 0) - (difference < 0))


@by_token
def reinforce(token):
    return -token.advantage * token.now, -token.advantage


@by_token
def dro(token, dro_beta=0.0):
    difference = token.now - token.old
    loss = -token.advantage * token.now + dro_beta / 2 * difference**2
    return loss, -token.advantage + dro_beta * difference


def _weighed(token, inside, bound):
    weight = min(token.ratio, bound) if inside else 0.0
    return -weight * token.advantage * token.now, -weight * token.advantage


@by_token
def dppo_tv(token, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0):
    rise = math.exp(token.now) - math.exp(token.old)
    inside = rise <= clip_ratio_high if token.advantage > 0 else -rise <= clip_ratio_low
    return _weighed(token, inside, clip_ratio_c)


@by_token
def dppo_kl(token, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0):
    p, q = math.exp(token.now), math.exp(token.old)
    kl = q * (token.old - token.now) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    if kl <= (clip_ratio_high if token.advantage > 0 else clip_ratio_low):
        return _weighed(token, True, clip_ratio_c)
    return _weighed(token, p <= q if token.advantage > 0 else p >= q, clip_ratio_c)


ALL = (cispo, clip_cov, dppo_kl, dppo_tv, dro, geo_mean, gspo, kl_cov, reinforce, sapo, vanilla)
SLOW = {loss.__name__: loss for loss in ALL} | {"gpg": reinforce}
