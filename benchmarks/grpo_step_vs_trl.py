"""Compare seconds per GRPO step of Tandem and TRL: same model, data, dtype and lengths, in one run.

The model is a Qwen2 of about 3 million parameters. A step has 32 prompts of 6 tokens with 8 completions each.
In the mode "equal" every completion has 64 tokens, so no side can save padding. In the mode "spread" both
sides are forced to lengths from 4 to 64. A step includes everything from prompts to updated weights:
generation, rewards, advantages and update. The sides take turns, and the best step of each counts, so other
load on the machine favours neither. Each side uses the fastest of its own settings: micro-batch size, and for
TRL in bf16 the precision (autocast over fp32 weights, as in Tandem, or pure bf16).

    python benchmarks/grpo_step_vs_trl.py [--precisions fp32 bf16] [--modes equal spread] [--out FILE]

TRL runs in its own environment; create it with `make peers`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from tiny import arguments, peer
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.config.load import load_train_config
from tandem.demo.model import build_tokenizer
from tandem.demo.problems import split, write_problems
from tandem.observability.run import read_metrics
from tandem.protocol import DataProto, Request, SamplingParams
from tandem.trainer.assembly import build_ppo
from tandem.workers.actor import ActorWorker
from tandem.workers.rollout_part import RolloutPart

HERE = Path(__file__).resolve().parent
TRL = HERE.parent / ".peers" / "trl" / "bin" / "python"
MODES = ("equal", "spread")


@dataclass(frozen=True)
class Size:
    """The size of a step.

    Attributes:
        prompts: prompts per step.
        n: completions per prompt.
        longest: tokens of the longest completion.
    """

    prompts: int
    n: int
    longest: int

    def lengths(self, mode: str) -> list[int]:
        """Return the number of tokens of each completion."""
        count = range(self.prompts * self.n)
        return [self.longest if mode == "equal" else 4 + (i * 37) % (self.longest - 3) for i in count]


FULL, TINY = Size(32, 8, 64), Size(4, 2, 8)
TRL_SETTINGS = {
    "fp32": [("fp32", 256), ("fp32", 64)],
    "bf16": [("bf16-autocast", 256), ("bf16-pure", 256), ("bf16-pure", 64)],
}
TANDEM_SETTINGS = [2048, 3072, 4096]  # tokens per micro-batch


def make_files(folder: Path, size: Size) -> None:
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "train.parquet", split(seed=0, train=512, validation=8).train, part="train")
    for mode in MODES:
        (folder / f"{mode}.json").write_text(json.dumps(size.lengths(mode)))


def settings(folder: Path, size: Size, precision: str, tokens: int) -> list[str]:
    """Return the config keys of the measured step.

    Args:
        folder: a folder written by `make_files`.
        size: the size of the step.
        precision: the dtype.
        tokens: tokens per micro-batch.
    """
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={size.prompts}",
        "data.max_prompt_length=8",
        f"data.max_response_length={size.longest}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={size.n}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={size.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
        f"actor_rollout_ref.actor.fsdp_config.dtype={precision}",
        "trainer.samples_freq=-1",
        "trainer.logger=[]",
    ]


class SetLengths(RolloutPart):
    """A rollout that writes a given number of tokens for each request.

    The lengths are part of the benchmark, not of the policy, so no token ends a response.
    """

    lengths: ClassVar[Sequence[int]] = ()

    def requests(self, prompts: DataProto, n: int, params: SamplingParams) -> list[Request]:
        asked = super().requests(prompts, n, params)
        return [
            replace(request, params=replace(request.params, max_tokens=length, stop_token_ids=()))
            for request, length in zip(asked, self.lengths, strict=True)
        ]


class SetLengthsActor(ActorWorker):
    """The policy's worker with a rollout of given lengths."""

    rollout_part = SetLengths


def tandem_steps(
    folder: Path, mode: str, precision: str, tokens: int, count: int, size: Size
) -> dict[str, Any]:
    """Run in a separate process; return the seconds of each step after two warm-up steps."""
    run = Path(tempfile.mkdtemp(dir=folder))
    overrides = [
        *settings(folder, size, precision, tokens),
        f"trainer.total_training_steps={count + 2}",
        f"trainer.worker_classes={{actor_rollout: {__name__}:SetLengthsActor}}",
        f"trainer.default_local_dir={run}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]
    SetLengths.lengths = size.lengths(mode)
    trainer = build_ppo(load_train_config(None, overrides).config, say=lambda _: None)
    trainer.fit()
    rows = read_metrics(run / "metrics.jsonl")[2:]
    for row in rows:
        assert row["tokens/response"] == sum(SetLengths.lengths), row["tokens/response"]
    fastest = min(rows, key=lambda row: row["timing/step"])
    phases = {name: value for name, value in fastest.items() if name.startswith("timing/")}
    return {"seconds": [row["timing/step"] for row in rows], "phases": phases}


def run_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def trl_seconds(folder: Path, mode: str, setting: tuple[str, int], steps: int, size: Size) -> list[float]:
    precision, micro_batch = setting
    micro_batch = min(micro_batch, size.prompts * size.n)
    command = [
        str(TRL), str(HERE / "peers" / "trl_grpo_step.py"),
        "--model", str(folder / "model"), "--prompts", str(folder / "train.parquet"),
        "--lengths", str(folder / f"{mode}.json"), "--precision", precision,
        "--n", str(size.n), "--micro-batch", str(micro_batch), "--steps", str(steps), "--warmup", "1",
    ]  # fmt: skip
    seconds: list[float] = run_json(command)["all_seconds"]
    return seconds


def tandem_seconds(
    folder: Path, mode: str, precision: str, tokens: int, steps: int, size: Size
) -> list[float]:
    words = ["--tandem", str(folder), mode, precision, str(tokens), str(steps)]
    words += ["--tiny"] if size is TINY else []
    seconds: list[float] = run_json([sys.executable, __file__, *words])["seconds"]
    return seconds


def fastest(run: Callable[[Any], list[float]], settings: Sequence[Any]) -> tuple[Any, list[float]]:
    """Run each setting once and the fastest again; return this setting and its seconds."""
    tried = {setting: run(setting) for setting in settings}
    best = min(tried, key=lambda setting: min(tried[setting]))
    return best, tried[best] + (run(best) if len(tried) > 1 else [])


def compare(folder: Path, mode: str, precision: str, args: argparse.Namespace, size: Size) -> dict[str, Any]:
    few = 1 if size is TINY else None
    tokens, tandem = fastest(
        lambda setting: tandem_seconds(folder, mode, precision, setting, args.steps, size),
        TANDEM_SETTINGS[:few],
    )
    row: dict[str, Any] = {
        "mode": mode,
        "precision": precision,
        "tandem_s": min(tandem),
        "tandem_setting": f"{tokens} tokens per micro-batch",
        "tandem_all_s": tandem,
    }
    told = f"{mode:>7} {precision:>5} {row['tandem_s']:>10.2f}"
    if args.with_trl:
        setting, trl = fastest(
            lambda setting: trl_seconds(folder, mode, setting, args.steps, size),
            TRL_SETTINGS[precision][:few],
        )
        row |= {
            "trl_s": min(trl),
            "ratio": min(trl) / min(tandem),
            "trl_setting": f"{setting[0]}, micro-batch {setting[1]}",
            "trl_all_s": trl,
        }
        told += f" {row['trl_s']:>8.2f} {row['ratio']:>7.2f}   {row['trl_setting']}"
    print(told, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tandem", nargs=5, help=argparse.SUPPRESS)
    args = arguments(parser, precisions=["fp32"], modes=["spread"], steps=1)
    size = TINY if args.tiny else FULL
    if args.tandem:
        folder, mode, precision, tokens, steps = args.tandem
        counts = int(tokens), int(steps)
        print(json.dumps(tandem_steps(Path(folder), mode, precision, *counts, size)))
        return
    args.with_trl = peer("trl", tiny=args.tiny)
    print("   mode dtype  tandem s    trl s   ratio   TRL's fastest setting")
    with tempfile.TemporaryDirectory() as name:
        make_files(Path(name), size)
        rows = [compare(Path(name), mode, p, args, size) for p in args.precisions for mode in args.modes]
    if args.out:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "trl": "1.16.0",
            },
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
