"""Measure how far rollout and training differ in a mixture of experts, without and with replay.

The native engine generates responses in bf16. Then the training engine computes their log-probs in bf16:
without replay, and with the rollout's experts (R3). Updates follow, and the log-probs are computed again:
without replay, with the experts of the first pass (R2), and with the rollout's experts (R3). For each pair of
passes, the program prints the share of differing experts, and the mean and largest |difference| of log-probs.

    python benchmarks/routing_replay.py [--updates 4] [--lr 1e-5] [--dtype bf16] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rollout_vs_hf import machine
from rollout_vs_vllm import make_requests
from tiny import arguments
from torch import Tensor
from train_step import MeanLogProb
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.device import choose_device, set_threads
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.models.routing import ROUTED
from tandem.protocol import DataProto, SamplingParams
from tandem.watch.gap import SAMPLED
from tandem.workers.samples import rollout_batch

RESULTS = Path(__file__).parent / "results" / "routing_replay.json"
VOCABULARY = 4096
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 4}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "moe_intermediate_size": 64, "head_dim": 48, "norm_topk_prob": True},
    "deepseek_v3": {
        **{"n_routed_experts": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "v_head_dim": 48},
        **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, **LATENT},
    },
}


def make_engine(folder: Path, kind: str, dtype: str, lr: float, device: torch.device) -> FSDPEngine:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES, **MODELS[kind], initializer_range=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder)),
        fsdp=FSDPConfig(dtype=dtype),
        optim=OptimConfig(lr=lr),
        total_steps=1,
        device=device,
    )


def rollout(engine: FSDPEngine, prompts: int, device: torch.device) -> DataProto:
    """Return two responses to each prompt, with the rollout's log-probs and experts."""
    requests = make_requests(VOCABULARY, prompts, 2)
    sampler = NativeEngine(device=device, max_length=256, max_num_seqs=64, records_experts=True)
    with engine.unsharded() as module:
        sampler.update_weights(SharedModule(module), 0)
        samples = generate(sampler, requests)
    options = {"dtype": engine.output_dtype, "reshaped": SamplingParams().reshapes}
    return rollout_batch(DataProto({}, {}), requests, samples, mixtures=engine.mixtures, **options)


def forward(engine: FSDPEngine, batch: DataProto, experts: Any = None) -> tuple[Tensor, Any]:
    """Return the log-probs of the response, and the experts that computed them."""
    columns = {name: batch.batch[name] for name in ("tokens", "response_mask")}
    given = DataProto(columns | ({} if experts is None else {ROUTED: experts}))
    micro = MicroBatching(max_tokens=2048)
    out = engine.forward(given, outputs=frozenset({"log_probs", ROUTED}), micro=micro)
    return out.ragged("log_probs").values[batch.ragged("response_mask").values], out.ragged(ROUTED)


def compare(now: tuple[Tensor, Any], before: tuple[Tensor, Any]) -> dict[str, float]:
    apart = (now[0] - before[0]).abs()
    mine, theirs = (each[1].values for each in (now, before))
    differ = (mine.unsqueeze(-1) != theirs.unsqueeze(-2)).all(-1).double()
    return {
        "experts_differ": float(differ.mean()),
        "log_prob_diff_mean": float(apart.mean()),
        "log_prob_diff_max": float(apart.max()),
    }


def measure(kind: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), kind, options.dtype, options.lr, device)
    batch = rollout(engine, options.prompts, device)
    sampled = batch.ragged(SAMPLED).values[batch.ragged("response_mask").values], batch.ragged(ROUTED)
    own, replayed = forward(engine, batch), forward(engine, batch, sampled[1])
    rows = {("rollout, old", "disabled"): compare(own, sampled)}
    rows["rollout, old", "R3"] = compare(replayed, sampled)
    plain = batch.select(["tokens", "response_mask"], ())
    for _ in range(options.updates):
        engine.train_step(plain, MeanLogProb(), micro=MicroBatching(max_tokens=2048))
    rows["old, updated", "disabled"] = compare(forward(engine, batch), own)
    rows["old, updated", "R2"] = compare(forward(engine, batch, own[1]), own)
    rows["old, updated", "R3"] = compare(forward(engine, batch, sampled[1]), replayed)
    return [
        {"model": kind, "passes": passes, "mode": mode, **found} for (passes, mode), found in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = arguments(parser, prompts=2, updates=1)
    set_threads(options.threads)
    device = choose_device("cpu")
    rows: list[dict[str, Any]] = []
    for kind in MODELS:
        rows += measure(kind, options, device)
    for row in rows:
        print(json.dumps(row), flush=True)
    found = {"machine": machine(device), "dtype": options.dtype, "updates": options.updates, "lr": options.lr}
    options.out.write_text(json.dumps(found | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
