"""Compare a training step of Tandem's engine with plain transformers, in the same run.

Both take a 3.2M-parameter Qwen2 and 256 sequences of 6 prompt and 64 response tokens through forward,
backward and AdamW. The peer is transformers' forward on a rectangle without padding, log-softmax, and fused
AdamW, in micro-batches of 64. The two take turns on the same machine. The program reports the best turns, in
tokens per second of wall-clock time, and the share of the matrix product floor: the time of the model's
linear layers alone, at the best rate measured here.

    python benchmarks/train_step.py [--turns 4] [--checkpointing] [--spread] [--device cpu]

It measures fp32 and bf16 on a CPU, and bf16 on CUDA.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from device.rates import clock
from tiny import arguments
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.device import choose_device
from tandem.engines.train.base import Counts, MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.models.linear import linear
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged

PROMPT, RESPONSE, SAMPLES, VOCABULARY = 6, 64, 256, 64


class MeanLogProb:
    """The simplest loss: minus the mean log-prob of the response tokens."""

    outputs = frozenset({"log_probs", "entropy"})
    columns = frozenset({"response_mask"})

    def __call__(
        self, out: dict[str, Tensor], columns: dict[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        return -(out["log_probs"] * columns["response_mask"]).sum() / counts.tokens, Metrics()


def save_model(folder: Path) -> int:
    """Save a random model in `folder`; return its number of weights in linear layers."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight"))


def tandem_step(
    folder: Path, dtype: str, batch: DataProto, checkpointing: bool, device: torch.device
) -> Callable[[], None]:
    engine = FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder), enable_gradient_checkpointing=checkpointing),
        fsdp=FSDPConfig(dtype=dtype),
        optim=OptimConfig(lr=1e-5),
        total_steps=1000,
        device=device,
    )
    return lambda: engine.train_step(batch, MeanLogProb(), micro=MicroBatching()).to_floats() and None


def transformers_step(
    folder: Path, dtype: torch.dtype, batch: DataProto, device: torch.device, **options: Any
) -> Callable[[], None]:
    options = {"dtype": dtype, "attn_implementation": "sdpa", **options}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = batch.ragged("tokens")
    ids_BT = tokens.to_padded().to(device)
    mask_BT = batch.ragged("response_mask").to_padded().bool().to(device)
    attend_BT = tokens.with_values(torch.ones_like(tokens.values)).to_padded().to(device)
    total = int(mask_BT.sum())

    def step() -> None:
        for rows in torch.arange(len(ids_BT)).split(64):
            ids, attend = ids_BT[rows], attend_BT[rows]
            full = bool(attend.all())
            logits = model(ids, attention_mask=None if full else attend, use_cache=False).logits
            log_p = torch.log_softmax(logits[:, :-1].float(), -1)
            picked = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
            (-(picked * mask_BT[rows][:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the best FLOP/s of a linear layer of the model's shape."""
    x, w = (torch.randn(rows, 256, dtype=dtype, device=device) for rows in (1120, 768))

    def best(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        with torch.no_grad():
            return min(clock(lambda: product(x, w), device) for _ in range(50))

    return 2 * x.shape[0] * w.numel() / min(best(F.linear), best(linear))


def describe(device: torch.device) -> str:
    """Return the name of the device, or the processor and its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def make_batch(spread: bool, samples: int) -> DataProto:
    torch.manual_seed(0)
    shortest = 4 if spread else RESPONSE
    lengths = PROMPT + torch.randint(shortest, RESPONSE + 1, (samples,))
    tokens = Ragged.from_lengths(torch.randint(0, VOCABULARY, (int(lengths.sum()),)), lengths)
    return DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() >= PROMPT)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations (Tandem only)")
    parser.add_argument("--spread", action="store_true", help="responses have 4 to 64 tokens instead of 64")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    options = arguments(parser, turns=1)
    device = choose_device(options.device)
    batch = make_batch(options.spread, 16 if options.tiny else SAMPLES)
    tokens = len(batch.ragged("tokens").values)
    machine = describe(device)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}, {tokens} tokens")
    with tempfile.TemporaryDirectory() as name:
        weights = save_model(Path(name))
        kinds = [("fp32", torch.float32)] if device.type == "cpu" else []
        for dtype, kind in (*kinds, ("bf16", torch.bfloat16)):
            ours = tandem_step(Path(name), dtype, batch, options.checkpointing, device)
            peer = transformers_step(Path(name), kind, batch, device)
            ours(), peer()
            turns = [(clock(ours, device), clock(peer, device)) for _ in range(options.turns)]
            fast, plain = (min(column) for column in zip(*turns, strict=True))
            floor = 6 * weights * tokens / product_rate(kind, device)
            row = {
                "dtype": dtype,
                "tandem_tokens_per_s": round(tokens / fast),
                "transformers_tokens_per_s": round(tokens / plain),
                "ratio": round(plain / fast, 2),
                "share_of_floor": round(floor / fast, 2),
            }
            print(json.dumps(row))


if __name__ == "__main__":
    main()
