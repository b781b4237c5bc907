"""Compare a model with a sliding window with plain transformers and with vLLM, in one run.

The model is a Mistral of 30M parameters with a window of 64 tokens. Update: sequences of 64 to 512 tokens
through forward, backward and AdamW, as in train_step.py. Rollout: 64 prompts of 32 tokens with 16 to 192 new
tokens each, as in rollout_vs_vllm.py. The sides take turns, and the best turn of each counts.

    python benchmarks/window_model.py [--dtype fp32] [--turns 3] [--engines tandem vllm hf] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from device.rates import clock
from rollout_vs_hf import DTYPES, SIZES, machine
from rollout_vs_vllm import VLLM, make_requests, measure
from tiny import arguments, peer
from train_step import tandem_step, transformers_step
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from tandem.device import choose_device, set_threads
from tandem.protocol import DataProto, Ragged

RESULTS = Path(__file__).parent / "results" / "window_model.json"
WINDOW, SHORTEST, LONGEST, PROMPT = 64, 64, 512, 32


def build(size: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES[size], sliding_window=WINDOW, max_position_embeddings=1024)
    model: Any = MistralForCausalLM(config)
    return model.to(dtype=dtype).eval()  # type: ignore[no-any-return]


def make_batch(vocabulary: int, samples: int) -> DataProto:
    torch.manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (samples,))
    tokens = Ragged.from_lengths(torch.randint(0, vocabulary, (int(lengths.sum()),)), lengths)
    return DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() >= PROMPT)})


def update(
    module: PreTrainedModel, dtype: str, samples: int, turns: int, plain: Mapping[str, dict[str, Any]]
) -> dict[str, float]:
    """Return the tokens/s of an update of each side, and the ratio of Tandem to the fastest other.

    `plain` has the options of transformers' model, by the name of the side.
    """
    device, batch = torch.device("cpu"), make_batch(module.config.vocab_size, samples)
    tokens = len(batch.ragged("tokens").values)
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        ours = tandem_step(Path(folder), dtype, batch, False, device)
        steps = {"tandem": ours} | {
            name: transformers_step(Path(folder), DTYPES[dtype], batch, device, **options)
            for name, options in plain.items()
        }
        for step in steps.values():
            step()
        took = [{name: clock(step, device) for name, step in steps.items()} for _ in range(turns)]
    best = {name: min(turn[name] for turn in took) for name in steps}
    rates = {f"{name}_tokens_per_s": tokens / seconds for name, seconds in best.items()}
    return {**rates, "ratio": min(best[name] for name in plain) / best["tandem"]}


def compare(
    about: str,
    build: Callable[[str, torch.dtype], PreTrainedModel],
    facts: dict[str, Any],
    results: Path,
    plain: Mapping[str, dict[str, Any]],
) -> None:
    """Run the program of the command line.

    Args:
        about: the description of the program.
        build: a function that makes the model from the name of a size and a dtype.
        facts: facts about the model, for the file of results.
        results: the default of this file.
        plain: see `update`.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="30M")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--samples", type=int, default=32, help="sequences of an update")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of the rollout")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=("vllm", "hf"), default=["vllm", "hf"])
    parser.add_argument("--out", type=Path, default=results)
    options = arguments(parser, size="3.2M", samples=4, prompts=4, turns=1)
    set_threads(options.threads)
    device = choose_device("cpu")
    module = build(options.size, DTYPES[options.dtype])
    found: dict[str, Any] = {"machine": machine(device), **facts, "dtype": options.dtype}
    found["update"] = update(module, options.dtype, options.samples, options.turns, plain)
    print(json.dumps(found["update"]), flush=True)
    engines = ["tandem", *options.engines]
    if "vllm" in engines and not peer("vllm", tiny=options.tiny):
        engines.remove("vllm")
    peers = {"vllm": VLLM(module, options.dtype, options.threads)} if "vllm" in engines else {}
    requests = make_requests(SIZES[options.size]["vocab_size"], options.prompts, 1)
    found["rollout"] = measure(module, requests, engines, peers, device, options.turns)
    found["peer"] = {name: side.versions for name, side in peers.items()}
    for side in peers.values():
        side.close()
    print(json.dumps(found["rollout"]["tandem_over"]), flush=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    compare(__doc__, build, {"window": WINDOW}, RESULTS, {"hf": {}})
