"""Measure how well `tandem.memory` predicts the memory of a log-prob pass and an update.

The reference is a trace. torch's FSDPMemTracker follows every operation of Tandem's own model under fake
tensors, sharded by Tandem's own code, as one of 1 to 512 ranks (see `traced_memory`). The shapes are from
0.5B to 72B with 3 to 6 layers, because layers are alike, and two models have all their layers. Levers are on
and off. Eight models have windows, chunks, sinks, soft caps or experts. Six mixtures have their experts whole
or divided over ranks, and all their experts get equally many tokens. The held-out cases are drawn from
seeds, and were traced after the formulas were written.

Both sides count the same tensors. The comparison excludes what a CPU cannot trace: GPU kernels, the GPU's
allocator, the cache, and copies to the host.

    python benchmarks/plan_memory.py [--only NAME ...] [--report] [--out FILE]

Cases in an existing file are kept, and missing cases are traced. --report only prints the table. The program
fails if the median error of the totals is above 3% or the worst is above 10%, for the designed cases,
those with windows, the mixtures, or the held-out ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tiny import arguments
from traced_memory import Case, traced

from tandem.memory.activations import Setup
from tandem.memory.gathered import Gathered
from tandem.memory.shapes import model_shape, published
from tandem.memory.training import Way, forward_moments, update_moments, worst

OUT = Path(__file__).parent / "results" / "plan_memory.json"
MEDIAN, WORST = 0.03, 0.10
SEED, HELD_OUT = 20261124, 15
MODELS = (
    *(
        "Qwen2.5-0.5B",
        "Qwen2.5-1.5B",
        "Qwen2.5-3B",
        "Qwen2.5-7B",
        "Qwen2.5-14B",
        "Qwen2.5-32B",
        "Qwen2.5-72B",
    ),
    *("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Llama-3.2-1B", "Llama-3-8B", "Llama-3-70B", "Mistral-7B-v0.3"),
)
WINDOWS: dict[str, dict[str, Any]] = {
    "Gemma 2 2B": {**(published("gemma-2-2b") or {}), "num_hidden_layers": 4},
    "Gemma 3 1B": {**(published("gemma-3-1b") or {}), "num_hidden_layers": 6},
    "gpt-oss 20B": {
        **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "head_dim": 64},
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    },
    "OLMo 3 7B": {
        **{"model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4},
        **{
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100278,
            "sliding_window": 4096,
        },
    },
    "Phi-3 mini": {
        **{"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047},
    },
    "Cohere 2 7B": {
        **{"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 256000},
        **{"sliding_window": 4096, "tie_word_embeddings": True},
    },
    "Llama 4 Scout text": {
        **{"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192},
        **{"intermediate_size_mlp": 16384, "num_hidden_layers": 4, "num_attention_heads": 40},
        **{"num_key_value_heads": 8, "vocab_size": 202048, "head_dim": 128, "num_local_experts": 16},
        **{"num_experts_per_tok": 1, "attention_chunk_size": 8192, "use_qk_norm": True},
    },
    "Mistral 7B": {**(published("mistral-7b") or {}), "num_hidden_layers": 4, "sliding_window": 4096},
}
_ROUTED = {"n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3 30B-A3B": {**(published("qwen3-30b-a3b") or {}), "num_hidden_layers": 3},
    "DeepSeek-V3": {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432},
        **{"num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128},
        **{"vocab_size": 129280, "n_routed_experts": 256, "moe_intermediate_size": 2048},
        **_ROUTED,
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        **{"v_head_dim": 128, "n_group": 8, "topk_group": 4},
    },
    "Mixtral 8x7B": {
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "GLM 4.5 Air": {
        **{"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944},
        **{"num_hidden_layers": 4, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": 151552, "n_routed_experts": 128, "moe_intermediate_size": 1408},
        **_ROUTED,
        **{"n_group": 1, "topk_group": 1},
    },
    "gpt-oss 20B": {**WINDOWS["gpt-oss 20B"], "num_hidden_layers": 3},
    "Qwen1.5 MoE A2.7B": {
        **{"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632},
        **{"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    },
}
LENGTHS = ((1024,) * 4, (1024,) * 8, (512,) * 8, (8192,), (700, 300, 20) * 4, (128, 128), (4096,) * 2)


def designed() -> Iterator[tuple[str, Case]]:
    """Yield cases with each lever on and off, on shapes of every size."""
    four, eight = (1024,) * 4, (1024,) * 8

    def case(model: str, layers: int, lengths: tuple[int, ...] = four, **levers: Any) -> tuple[str, Case]:
        said = " ".join(f"{name}={value}" for name, value in levers.items())
        shape = {**(published(model) or {}), "num_hidden_layers": layers}
        return f"{model} {layers} layers, {sum(lengths)} tokens {said}".strip(), Case(
            shape, lengths, **levers
        )

    small, middle, large = "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3-70B"
    for shards in (1, 8, 64):
        for mode in ("none", "ops", "full"):
            yield case(small, 4, shards=shards, mode=mode)
    for levers in (
        *({"micro": 2}, {"micro": 3}, {"reshard": False}, {"prefetch": True}, {"entropy": True}),
        *({"kind": "value"}, {"tensor": 2, "shards": 4}, {"tensor": 4, "shards": 2}, {"sequence": 4}),
        *({"kind": "value", "micro": 2}, {"tensor": 2, "shards": 4, "micro": 2}),
    ):
        yield case(middle, 4, eight, **{"shards": 8, "mode": "full", **levers})
    for levers in ({"shards": 64}, {"shards": 8, "tensor": 8}, {"shards": 16, "sequence": 8}):
        for mode in ("none", "full"):
            yield case(large, 3, eight, mode=mode, **levers)
    for model in MODELS:
        yield case(model, 3, (2048, 2048), shards=16, mode="full")
    yield case(small, 4, shards=8, micro=3, each=True)
    for levers in (
        {"shards": 8, "micro": 2},
        {"shards": 8, "micro": 2, "kind": "value"},
        {"shards": 4, "micro": 3, "tensor": 2},
        {"shards": 8, "micro": 2, "reshard": False},
    ):
        yield case(middle, 4, eight, mode="full", each=True, **levers)
    yield case(large, 3, eight, shards=64, mode="full", micro=2, each=True)
    yield case("Qwen2.5-0.5B", 24, shards=8, mode="full")
    yield case("Qwen2.5-7B", 28, shards=8, mode="none")
    for levers in (
        {"shards": 8, "mode": "full", "lora_rank": 32},
        {"shards": 8, "mode": "none", "lora_rank": 32},
        {"shards": 1, "mode": "ops", "lora_rank": 16},
        {"shards": 8, "mode": "full", "lora_rank": 32, "micro": 2, "each": True},
        {"shards": 4, "mode": "full", "lora_rank": 64, "tensor": 2},
        {"shards": 8, "mode": "none", "lora_rank": 8, "kind": "value"},
    ):
        yield case(middle, 4, eight, **levers)
    # were held-out cases once, and then used to improve the formulas
    yield from reduced_in_each("drawn, each", SEED + 1)
    yield from with_adapters("drawn, adapters", SEED + 3)  # the same


def windowed() -> Iterator[tuple[str, Case]]:
    """Yield cases whose layers have windows or chunks, longer and shorter than the sequences."""
    for name, model in WINDOWS.items():
        key = "sliding_window" if "sliding_window" in model else "attention_chunk_size"
        for window in (model[key], 256):
            for mode in ("none", "ops", "full"):
                said = (
                    f"{name}, window {window}, {model['num_hidden_layers']} layers, 4096 tokens mode={mode}"
                )
                yield said, Case({**model, key: window}, (1024,) * 4, shards=8, mode=mode)
    # were held-out cases once, and then used to improve the formulas
    yield from drawn("drawn, windows", SEED + 5, windows=True)
    yield from drawn("drawn again, windows", SEED + 6, windows=True)


def mixtures() -> Iterator[tuple[str, Case]]:
    """Yield cases with experts, whole or divided over 2 or 4 ranks. Two models also have many tokens."""
    for name, model in MIXTURES.items():
        many = ((4096,) * 8,) if name in ("Qwen3 30B-A3B", "DeepSeek-V3") else ()
        for lengths in ((1024,) * 4, *many):
            for shards, experts in ((8, 1), (8, 2), (8, 4), (4, 4)):
                for mode in ("none", "full"):
                    said = f"mixture {name}, {sum(lengths)} tokens {shards=} {experts=} {mode=}"
                    yield said, Case(model, lengths, shards=shards, experts=experts, mode=mode)


def held_out() -> Iterator[tuple[str, Case]]:
    """Yield the held-out cases, each group drawn from its own seed.

    The second group has several micro-batches with gradients reduced in each. The third group has adapters.
    The fourth group has windows.
    """
    yield from drawn("held out", SEED)
    yield from reduced_in_each("held out, each", SEED + 2)
    yield from with_adapters("held out, adapters", SEED + 4)
    yield from drawn("held out, windows", SEED + 7, windows=True)


def reduced_in_each(name: str, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield drawn cases with several micro-batches, with gradients reduced in each."""
    for each, case in drawn(name, seed):
        yield each, replace(case, micro=max(2, case.micro), shards=max(2, case.shards), each=True)


def with_adapters(name: str, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield drawn cases with adapters, where only the adapters are trained."""
    ranks = (8, 16, 32, 64, 128)
    for each, case in drawn(name, seed):
        yield each, replace(case, lora_rank=ranks[len(case.lengths) % 5], each=case.micro > 1)


def drawn(name: str, seed: int, windows: bool = False) -> Iterator[tuple[str, Case]]:
    """Yield cases drawn from a seed, with or without windows."""
    draw = random.Random(seed)
    models = [*WINDOWS.values()] if windows else [published(model) or {} for model in MODELS]
    for number in range(HELD_OUT):
        shape = {**draw.choice(models), "num_hidden_layers": draw.choice((3, 4, 6))}
        if not windows:
            shape["sliding_window"] = 2**20  # longer than all sequences
        heads, key_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        tensor = draw.choice([size for size in (1, 1, 2, 4, 8) if key_heads % size == 0])
        sequence = draw.choice([size for size in (1, 1, 2, 4) if heads // tensor % size == 0])
        yield (
            f"{name} {number + 1}",
            Case(
                shape,
                draw.choice(LENGTHS),
                micro=draw.choice((1, 1, 2, 3)),
                shards=max(draw.choice((1, 2, 8, 16, 64)), sequence),
                tensor=tensor,
                sequence=sequence,
                mode=draw.choice(("none", "ops", "full")),
                entropy=draw.random() < 0.3,
                kind=draw.choice(("policy", "policy", "value")),
                reshard=draw.random() < 0.8,
                prefetch=draw.random() < 0.2,
            ),
        )


def predicted(case: Case) -> dict[str, dict[str, float]]:
    """Return the prediction of `tandem.memory` for a case, by phase and kind."""
    shape = model_shape(case.model)
    rank = case.lora_rank
    split = {"tensor": case.tensor, "experts": case.experts, "shards": case.shards}
    own = Gathered.of(shape, **split, head=case.kind == "policy", lora_rank=rank)
    way = Way(
        Setup(itemsize=2, tensor=case.tensor, experts=case.experts, sequence=case.sequence, lora_rank=rank),
        master=4,
        shards=case.shards,
        mode=case.mode,
        reshard=case.reshard,
        prefetch=case.prefetch,
        head="torch" if case.kind == "policy" else "value",
        micro_batches=case.micro,
        each=case.each,
        entropy=case.entropy,
    )
    tokens = -(-sum(case.lengths) // case.sequence)
    weights = (4 * own.learned + 2 * (own.stored - own.learned)) / case.shards
    optimizer = 8 * own.learned / case.shards
    found = {}
    for phase, moments in (("log_prob", forward_moments), ("update", update_moments)):
        most = worst(moments(own, shape.decoder, way, tokens))
        rest = most.activations + most.head + most.gradients
        found[phase] = {
            "weights": weights,
            "optimizer": optimizer,
            "gathered": most.gathered,
            "rest": rest,
            "total": weights + optimizer + most.total,
        }
    return found


CASES = (*designed(), *windowed(), *mixtures(), *held_out())


def errors(row: dict[str, Any], guess: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the errors of a case by phase and kind, as shares of the traced total.

    Gradients, activations and the head's memory count as one kind, because the tracker separates them only at
    the end.
    """
    out = {}
    for phase, traced_bytes in row["traced"].items():
        known = {name: traced_bytes[name] for name in ("weights", "optimizer", "gathered", "total")}
        known["rest"] = known["total"] - known["weights"] - known["optimizer"] - known["gathered"]
        out[phase] = {name: (guess[phase][name] - known[name]) / known["total"] for name in known}
    return out


def report(rows: dict[str, Any]) -> bool:
    """Print the table; return whether the errors are within the limits."""
    fine = True
    print(f"{'case':78} {'log_prob':>9} {'error':>7} {'update':>9} {'error':>7}")
    totals: dict[tuple[str, str], list[float]] = {}
    for name, row in rows.items():
        found = row["errors"] = errors(row, predicted(Case(**row["case"])))
        cells = [
            f"{row['traced'][phase]['total'] / 2**30:8.2f}G {found[phase]['total']:+7.2%}" for phase in found
        ]
        print(f"{name:78.78} {' '.join(cells)}")
        for phase in found:
            first = name.partition(" ")[0]
            group = {"held": "held out", "mixture": "mixtures"}.get(first, "designed")
            group = "windows" if group == "designed" and ", window" in name else group
            totals.setdefault((group, phase), []).append(abs(found[phase]["total"]))
    for (group, phase), all_errors in sorted(totals.items()):
        middle, most = statistics.median(all_errors), max(all_errors)
        fine &= middle <= MEDIAN and most <= WORST
        print(f"{group:9} {phase:9} {len(all_errors):3} cases: median {middle:.2%}, worst {most:.2%}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = arguments(parser, only=["Qwen2.5-0.5B 4 layers, 4096 tokens shards=1 mode=full"])
    stored = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    rows: dict[str, Any] = stored["rows"]
    for name, case in () if options.report else CASES:
        if name in rows or (options.only and not any(word in name for word in options.only)):
            continue
        case = replace(case, model={key: value for key, value in case.model.items() if value is not None})
        rows[name] = {"case": asdict(case), "traced": traced(case)}
        options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        print(f"traced {name}", file=sys.stderr, flush=True)
    known = [name for name, _ in CASES]
    rows = stored["rows"] = {name: rows[name] for name in known if name in rows}
    fine = report(rows)
    options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
