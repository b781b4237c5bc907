"""Compare a mixture of experts with plain transformers and with vLLM, in one run.

The model is a Qwen3-MoE with 16 experts per layer. Each token uses 4 of them, which together are as large as
the MLP of the dense model with the size's name. So 30M parameters are active. The work is that of
window_model.py. Transformers' update runs with each of its implementations of experts that are fit for a CPU,
and the fastest one counts.

    python benchmarks/mixture_model.py [--dtype fp32] [--turns 3] [--engines tandem vllm hf] [--out FILE]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rollout_vs_hf import SIZES
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from window_model import compare

RESULTS = Path(__file__).parent / "results" / "mixture_model.json"
EXPERTS, EACH = 16, 4
PLAIN = {f"hf_{name}": {"experts_implementation": name} for name in ("eager", "grouped_mm")}


def build(size: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = SIZES[size]
    config = Qwen3MoeConfig(
        **shape,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        num_experts=EXPERTS,
        num_experts_per_tok=EACH,
        moe_intermediate_size=shape["intermediate_size"] // EACH,
        norm_topk_prob=True,
        max_position_embeddings=1024,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    return model.to(dtype=dtype).eval()  # type: ignore[no-any-return]


if __name__ == "__main__":
    compare(__doc__, build, {"experts": EXPERTS, "experts_per_token": EACH}, RESULTS, PLAIN)
