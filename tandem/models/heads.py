"""Output heads, evaluated in chunks of positions so that no tensor of all positions by the whole
vocabulary ever exists; the backward pass computes each chunk's logits again.

Shapes: M positions, D hidden features, V vocabulary entries, C positions of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.models.linear import product

# Bytes of one chunk of logits in the output's precision, by kind of device.
_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def token_log_probs(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, if asked for, the entropy of its distribution, both of
    softmax(hidden weightᵀ / temperature).

    Args:
        hidden_MD: states that predict; any floating type.
        weight_VD: the output embedding, same type.
        targets_M: int64 token ids.
        temperature: divides the logits; > 0.

    Returns:
        (M) log-probabilities and (M) entropies or None, nats; fp32, or fp64 for fp64 input.
    """
    assert hidden_MD.ndim == 2 and targets_M.shape == hidden_MD.shape[:1]
    assert weight_VD.shape[1] == hidden_MD.shape[1] and temperature > 0
    apply: Any = _TokenLogProbs.apply
    log_probs, entropy = apply(hidden_MD, weight_VD, targets_M, temperature, with_entropy)
    return log_probs, (entropy if with_entropy else None)


class _TokenLogProbs(torch.autograd.Function):
    """d log p_t / d z = onehot_t - p; d H / d z = -p (log p + H), with z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out_type = torch.promote_types(hidden_MD.dtype, torch.float32)
        log_probs_M = hidden_MD.new_empty(len(hidden_MD), dtype=out_type)
        entropy_M = log_probs_M.new_empty(len(hidden_MD) if entropy else 0)
        normalizer_M = torch.empty_like(log_probs_M)
        for rows in _chunks(hidden_MD, weight_VD, out_type):
            log_p_CV = _logits(hidden_MD[rows], weight_VD, temperature, out_type)
            normalizer_M[rows] = torch.logsumexp(log_p_CV, -1)
            log_p_CV.sub_(normalizer_M[rows].unsqueeze(-1))
            log_probs_M[rows] = log_p_CV.gather(-1, targets_M[rows].unsqueeze(-1)).squeeze(-1)
            if entropy:
                # Not log-sum minus mean logit: that difference loses a digit or two in fp32.
                entropy_M[rows] = -torch.linalg.vecdot(log_p_CV.exp(), log_p_CV)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, normalizer_M, entropy_M)
        ctx.temperature = temperature
        return log_probs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden_MD, weight_VD, targets_M, normalizer_M, entropy_M = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None
        grad_hidden_MD = torch.empty_like(hidden_MD)
        # Summed over chunks in the output's precision: bf16 sums would lose the later chunks.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normalizer_M.dtype)
        for rows in _chunks(hidden_MD, weight_VD, normalizer_M.dtype):
            log_p_CV = _logits(hidden_MD[rows], weight_VD, ctx.temperature, normalizer_M.dtype)
            log_p_CV.sub_(normalizer_M[rows].unsqueeze(-1))
            grad_CV = log_p_CV.exp()
            coefficient_C = torch.zeros_like(normalizer_M[rows])
            if grad_log_probs is not None:
                coefficient_C -= grad_log_probs[rows]
            if grad_entropy is not None:
                spread_CV = log_p_CV.add_(entropy_M[rows].unsqueeze(-1))
                spread_CV.mul_(grad_entropy[rows].unsqueeze(-1))
                grad_CV.mul_(coefficient_C.unsqueeze(-1) - spread_CV)
            else:
                grad_CV.mul_(coefficient_C.unsqueeze(-1))
            grad_CV.scatter_add_(-1, targets_M[rows].unsqueeze(-1), -coefficient_C.unsqueeze(-1))
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_MD.dtype)
            grad_hidden_MD[rows] = product(grad_CV, weight_VD.T)
            grad_weight_VD += product(grad_CV.T, hidden_MD[rows].T)
        return grad_hidden_MD, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _chunks(hidden_MD: Tensor, weight_VD: Tensor, out_type: torch.dtype) -> list[slice]:
    budget = _CHUNK_BYTES.get(hidden_MD.device.type, _CHUNK_BYTES["cpu"])
    size = max(1, budget // (len(weight_VD) * out_type.itemsize))
    return [slice(start, start + size) for start in range(0, len(hidden_MD), size)]


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, out_type: torch.dtype) -> Tensor:
    logits_CV = product(hidden_CD, weight_VD).to(out_type)
    return logits_CV if temperature == 1 else logits_CV.div_(temperature)
