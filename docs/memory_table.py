"""Print the tables of docs/memory.md.

    python docs/memory_table.py

The tables show what `tandem plan` predicts for the configs of examples/memory, and how much memory for
activations each lever saves in an update.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tandem.bench.asked import draw
from tandem.cli.fitting import judge_of
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.memory.activations import Setup
from tandem.memory.fit import Found, search
from tandem.memory.gathered import Gathered
from tandem.memory.plan import GIB, Plan, plan
from tandem.memory.shapes import shape_of
from tandem.memory.timing import Clock
from tandem.memory.training import Way, update_moments, worst

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples" / "memory").glob("*.yaml"))
LARGE = ROOT / "examples" / "memory" / "671b_64x141.yaml"
_NAME = re.compile(r"[^_]+_(\d+)x(\d+)(_fast)?")
_PHASES = ("reshard", "rollout", "old log-probs", "actor update")


def planned(file: Path) -> tuple[int, int, Plan]:
    """Return the number of devices and GiB per device in the file's name, and the plan."""
    match = _NAME.fullmatch(file.stem)
    assert match is not None, file
    config = load_train_config(str(file), elsewhere=True).config
    assert config.trainer.world_size == int(match[1]), file
    size = int(match[2])
    return int(match[1]), size, plan(config, shape_of, size * GIB)


def examples() -> Iterator[str]:
    """Yield a table row for each config: the GiB that each phase needs on a device."""
    yield "| config | devices | " + " | ".join(_PHASES) + " | free at worst | host memory |"
    yield "|---|---|" + "---|" * (len(_PHASES) + 2)
    for file in EXAMPLES:
        count, size, made = planned(file)
        phases = {phase.name: phase.total / GIB for phase in made.phases}
        cells = " | ".join(f"{phases[name]:.1f}" for name in _PHASES)
        name = f"[{file.stem}](../examples/memory/{file.name})"
        host = sum(made.host.values()) / GIB
        yield f"| {name} | {count} × {size} | {cells} | {made.margin / GIB:.1f} | {host:.0f} |"


def large() -> Iterator[str]:
    """Yield a table row for each number of devices: the GiB of a model with 671B parameters on a device."""
    yield "| devices | " + " | ".join(_PHASES) + " | free at worst | host memory |"
    yield "|---|" + "---|" * (len(_PHASES) + 2)
    for count in (64, 128, 256, 512):
        made = planned_on(LARGE, count)
        phases = {phase.name: phase.total / GIB for phase in made.phases}
        cells = " | ".join(f"{phases[name]:.1f}" for name in _PHASES)
        yield f"| {count} | {cells} | {made.margin / GIB:.1f} | {sum(made.host.values()) / GIB:.0f} |"


def planned_on(file: Path, devices: int) -> Plan:
    """Return the plan of a config on more or fewer nodes of 8 devices of 141 GB."""
    config = load_train_config(str(file), [f"trainer.nnodes={devices // 8}"], elsewhere=True).config
    return plan(config, shape_of, 141 * GIB)


def savings() -> Iterator[str]:
    """Yield a table row for each model: how much memory each lever saves in an update.

    A cell has two shares: of the activations, and of everything that the update holds besides weights and
    optimizer moments. The update has one micro-batch of 8,192 tokens, on one of eight devices.
    """
    yield "| model | none: activations, everything | ops | full | full, offloaded |"
    yield "|---|---|---|---|---|"
    for name in (
        "Qwen/Qwen2.5-3B",
        "meta-llama/Llama-3.1-8B",
        "Qwen/Qwen2.5-32B",
        "meta-llama/Llama-3.1-70B",
    ):
        shape = shape_of(name)
        own, setup = Gathered.of(shape), Setup(itemsize=2, fused=True)
        way = Way(setup, master=4, shards=8, head="triton")
        ways = {
            "none": way,
            "ops": replace(way, mode="ops"),
            "full": replace(way, mode="full"),
            "host": replace(way, mode="full", setup=replace(setup, offloaded=True)),
        }
        most = {key: worst(update_moments(own, shape.decoder, each, 8192)) for key, each in ways.items()}
        kept = {
            key: max(moment.activations for moment in update_moments(own, shape.decoder, each, 8192))
            for key, each in ways.items()
        }
        cells = [
            f"{1 - kept[key] / kept['none']:.0%}, {1 - most[key].total / most['none'].total:.0%}"
            for key in ("ops", "full", "host")
        ]
        sizes = f"{kept['none'] / GIB:.1f} GiB, {most['none'].total / GIB:.1f} GiB"
        yield f"| {name} | {sizes} | {' | '.join(cells)} |"


_ONE = (
    *("algorithm.adv_estimator=grpo", "data.max_prompt_length=1024", "data.max_response_length=1024"),
    *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.model.gradient_checkpointing_mode=full"),
    *("actor_rollout_ref.model.enable_activation_offload=true", "actor_rollout_ref.rollout.max_num_seqs=32"),
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
)
_THEIRS = (
    *(("Qwen/Qwen2.5-3B", 8, "15.9"), ("meta-llama/Llama-3.1-8B", 8, "27.4")),
    *(("Qwen/Qwen2.5-32B", 16, "71.8"), ("meta-llama/Llama-3.1-70B", 64, "")),
)


def beside_theirs() -> Iterator[str]:
    """Yield a table row for each model: the GiB of an update with every lever that saves memory.

    The update has one or several micro-batches of 8,192 tokens per device. The column "GB, elsewhere" has the
    figures of another system's table, which states neither lengths nor batch sizes.
    """
    yield "| model | devices | GB, elsewhere | one micro-batch | several | several, reduced once |"
    yield "|---|---|---|---|---|---|"
    for name, devices, theirs in _THEIRS:
        nodes = devices // 8
        size = [
            f"actor_rollout_ref.model.path={name}",
            f"trainer.nnodes={nodes}",
            "trainer.n_gpus_per_node=8",
        ]
        cells = []
        for several, sync in ((1, "each"), (4, "each"), (4, "once")):
            # each prompt has 8 responses; prompt and response have 2,048 tokens in total
            prompts = several * devices // 2
            words = [*size, *_ONE, f"data.train_batch_size={prompts}"]
            actor = "actor_rollout_ref.actor"
            words += [f"{actor}.ppo_mini_batch_size={prompts}", f"{actor}.use_dynamic_bsz=true"]
            words += [f"{actor}.ppo_max_token_len_per_gpu=8192"]
            words += [f"{actor}.fsdp_config.gradient_sync={sync}"]
            made = plan(load_train_config(None, words, elsewhere=True).config, shape_of, 1000 * GIB)
            phases = {phase.name: phase.needed / GIB for phase in made.phases}
            cells.append(f"{phases['actor update']:.1f}")
        yield f"| {name} | {devices} | {theirs} | {' | '.join(cells)} |"


PAIRS = (
    *(("Qwen/Qwen2.5-0.5B", "1x24GB"), ("Qwen/Qwen2.5-1.5B", "1x40GB"), ("Qwen/Qwen2.5-1.5B", "8x24GB")),
    *(("Qwen/Qwen2.5-3B", "8x40GB"), ("Qwen/Qwen2.5-7B", "8x80GB"), ("meta-llama/Llama-3.1-8B", "8x80GB")),
    *(("Qwen/Qwen2.5-14B", "8x80GB"), ("Qwen/Qwen2.5-32B", "8x141GB"), ("Qwen/Qwen2.5-32B", "16x80GB")),
    ("meta-llama/Llama-3.1-70B", "64x80GB"),
)
_RUN = (
    *("algorithm.adv_estimator=grpo", "data.train_batch_size=128", "data.max_prompt_length=1024"),
    *("data.max_response_length=3072", "actor_rollout_ref.rollout.n=8"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
)


@functools.cache
def fitted_pair(model: str, devices: str) -> tuple[Plan, TrainConfig, Found]:
    """Return the result of `tandem plan --fit` and the plan of the config that it finds."""
    count, _, size = devices.removesuffix("GB").partition("x")
    words = [f"actor_rollout_ref.model.path={model}", *_RUN, f"trainer.nnodes={-(-int(count) // 8)}"]
    words += [f"trainer.n_gpus_per_node={min(8, int(count))}"]
    clock = Clock.of({}, None, float(size), cuda=True)
    given = load_train_config(None, words, elsewhere=True).config
    lengths = draw(given, "", "")
    found = search(given, judge_of(None, words, float(size) * GIB, clock, lengths))
    keys = [f"{key}={json.dumps(value)}" for key, value in found.changes.items()]
    config = load_train_config(None, [*words, *keys], elsewhere=True).config
    return plan(config, shape_of, float(size) * GIB), config, found


def fitted() -> Iterator[str]:
    """Yield a table row for each pair: what was found, the free GiB, and the floor of a step."""
    head = ("model", "devices", "tensor, sequence, stages, shards", "recomputed", "offloaded")
    head += ("tokens: update, log-probs", "rollout: split, share", "free", "floor, s")
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * 9
    for pair in PAIRS:
        made, config, found = fitted_pair(*pair)
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        fsdp, rollout = actor.fsdp_config, config.actor_rollout_ref.rollout
        sizes = (fsdp.tensor_parallel_size, actor.ulysses_sequence_parallel_size)
        shards = "all" if fsdp.fsdp_size == -1 else fsdp.fsdp_size
        again = model.gradient_checkpointing_mode if model.enable_gradient_checkpointing else "none"
        host = {"weights": fsdp.param_offload, "optimizer": fsdp.optimizer_offload}
        host["activations"] = model.enable_activation_offload
        cells = (
            *pair,
            f"{sizes[0]}, {sizes[1]}, {fsdp.pipeline_parallel_size}, {shards}",
            again,
            ", ".join(name for name, away in host.items() if away),
            f"{actor.ppo_max_token_len_per_gpu:,}, {rollout.log_prob_max_token_len_per_gpu:,}",
            f"{rollout.tensor_model_parallel_size}, {rollout.gpu_memory_utilization}",
            f"{made.margin / GIB:.1f}",
            f"{found.seconds:.0f}",
        )
        yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print("\n".join([*examples(), "", *large(), "", *fitted(), "", *savings(), "", *beside_theirs()]))
