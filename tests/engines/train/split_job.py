"""A job that trains with layers split over ranks; each data-parallel rank takes its share of the rows.

Arguments: FOLDER of models, SAVED checkpoints of a single rank, RESULTS folder, CASES (core or all).
"""

import sys
from pathlib import Path

import split_models
import synthetic
import torch
import torch.distributed as dist

from tandem.engines.weight_sync import checksum
from tandem.errors import EngineError, TandemError
from tandem.models.activation_offload import SameStream
from tandem.models.parallel import init_distributed, leave_distributed

DIVIDED = {"whole": 1, "split": 2}  # number of ranks that split layers, by label


def divisions(world, cases):
    """Return the cases to train.

    Each case has: model, kind, precision, number of ranks that split layers, number of ranks that share one
    copy of the weights, and number of ranks that share tokens.
    """
    plain = [(name, "policy", "fp64", 2, -1, 1) for name in ("qwen2", "qwen3", "llama")]
    plain += [("qwen2", "policy", "fp32", 2, -1, 1)]
    if cases == "core":
        return [*plain[:2], ("qwen3", "value", "fp64", 2, -1, 1)]
    if world == 2:
        return [*plain, ("qwen3", "value", "fp64", 2, -1, 1)]
    return [
        *plain,
        ("qwen3", "policy", "fp64", 2, 1, 1),
        ("qwen2", "policy", "fp64", 2, -1, 2),
        ("llama", "value", "fp64", 2, -1, 1),
        ("mistral", "policy", "fp64", 4, -1, 1),
    ]


def engine_of(folder, name, kind, precision, tensor, copy, sequence, *, mixed=False, **options):
    fsdp = {"tensor_parallel_size": tensor, "fsdp_size": copy}
    return synthetic.make_engine(
        folder / name,
        kind=kind,
        precision=precision,
        fsdp=fsdp | (split_models.MIXED if mixed else {}),
        sequence_parallel=sequence,
        **options,
    )


def my_rows(engine, batch):
    """Return this rank's rows. Shares are uneven: of two or more, the last has at most one row."""
    ends = [len(batch) * (i + 1) // engine.share.size for i in range(engine.share.size)]
    if len(ends) > 1:
        ends[-2] = len(batch) - 1
    begin = ends[engine.share.rank - 1] if engine.share.rank else 0
    return batch[begin : ends[engine.share.rank]]


def gathered(value):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def trained(folder, case):
    kind, precision = case[1:3]
    engine = engine_of(folder, *case)
    started = synthetic.weights(engine)
    metrics, forward = split_models.train(engine, my_rows(engine, split_models.batch_of(precision)), kind)
    parts = gathered((engine.share, forward))
    led = [found for share, found in sorted(parts, key=lambda part: part[0].rank) if share.leads]
    return {
        "started": started,
        "metrics": metrics,
        "forward": {key: torch.cat([found[key] for found in led]) for key in forward},
        "weights": synthetic.weights(engine),
        "shapes": engine.weight_shapes,
        "digests": gathered(engine.digest()),
        "half": gathered(engine.digest(torch.bfloat16)),
        "info": engine.state_info(),
        "replicas": gathered(replicas(engine)),
        "collectives": engine.take_collectives(),
    }


def replicas(engine):
    """Return checksums of the parameters that several ranks hold equally, and this rank's shard index."""
    whole = {
        name: int(checksum(value.to_local()))
        for name, value in engine.module.named_parameters()
        if value.placements[-1].is_replicate()
    }
    return engine.grid.weights["shard"].get_local_rank(), whole


def exchanged(folder):
    """Load weights into an engine of zeros from another engine whose ranks hold other parts."""
    source = engine_of(folder, "qwen2", "policy", "fp64", 1, -1, 1)
    target = engine_of(folder, "qwen2", "policy", "fp64", 2, -1, 1, frozen=True)
    for parameter in target.module.parameters():
        parameter.detach().zero_()
    exported = synthetic.weights(source)
    target.load_weights(reversed(exported.items()), 7)
    return {
        "exported": exported,
        "loaded": synthetic.weights(target),
        "version": target.version,
        "same_digest": gathered(target.digest() == source.digest()),
    }


def resumed(folder, saved, results, divided):
    """Load checkpoints under each division, take one step, and return weights and version.

    The checkpoints come from a single rank and from each division, with layers split or whole.
    """
    found = {}
    for name in split_models.SAVED[dist.get_world_size()]:
        sources = {"one": saved / name}
        for label, tensor in DIVIDED.items():
            engine = engine_of(folder, name, "policy", "fp64", tensor, -1, 1)
            engine.load(saved / name)
            sources[label] = results / f"{name}_{label}"
            engine.save(sources[label])
        for label in divided:
            for source, path in sources.items():
                engine = engine_of(folder, name, "policy", "fp64", DIVIDED[label], -1, 1)
                engine.load(path)
                rows = my_rows(engine, split_models.batch_of("fp64"))
                split_models.train(engine, rows, "policy", steps=1)
                found[name, source, label] = synthetic.weights(engine), engine.version
    return found


def one_step(folder, *, moved=False, **options):
    """Take a first step and return its metrics and the weights.

    With `moved`, the saved activations really are copied within host memory.
    """
    engine = engine_of(folder, "qwen2", "policy", "fp64", 2, -1, 1, **options)
    if moved:
        engine.activation_offload.lane = SameStream()
        engine.activation_offload.min_bytes = 0
    metrics, _ = split_models.train(engine, my_rows(engine, split_models.batch_of("fp64")), "policy", steps=1)
    return metrics, synthetic.weights(engine)


def scored(folder):
    """Return the scores of all rows by a reward model whose layers are split."""
    engine = engine_of(folder, "scorer", "score", "fp64", 2, -1, 1, frozen=True)
    rows = my_rows(engine, split_models.batch_of("fp64"))
    out = engine.forward(rows, outputs=frozenset({"scores"}), micro=synthetic.CUTS["three"])
    parts = gathered((engine.share, out.ragged("scores").values))
    return torch.cat([found for share, found in sorted(parts, key=lambda part: part[0].rank) if share.leads])


def refusals(folder):
    """Return the engine's messages for what it cannot do."""
    said = {}
    engine = engine_of(folder, "qwen2", "policy", "fp64", 2, -1, 1)
    try:
        with engine.unsharded():
            said["unsharded"] = "shared"
    except EngineError as error:
        said["unsharded"] = str(error)
    said["unshards"] = engine.unshards
    for name, tensor in (("qwen2", 3), ("qwen2", 4)):
        try:
            engine_of(folder, name, "policy", "fp64", tensor, -1, 1)
        except TandemError as error:
            said[name, tensor] = str(error)
    return said


def main():
    folder, saved, results = (Path(argument) for argument in sys.argv[1:4])
    record = {
        "trained": {case: trained(folder, case) for case in divisions(dist.get_world_size(), sys.argv[4])},
        "exchanged": exchanged(folder),
        "scored": scored(folder),
        "recomputed": one_step(folder, model={"gradient_checkpointing_mode": "full"}),
        "offloaded": one_step(folder, moved=True, model={"enable_activation_offload": True}),
        "mixed": one_step(folder, mixed=True),
        "resumed": resumed(folder, saved, results, ["split"] if sys.argv[4] == "core" else DIVIDED),
        "refusals": refusals(folder),
    }
    if dist.get_rank() == 0:
        torch.save(record, results / "record.pt")


if __name__ == "__main__":
    init_distributed(torch.device("cpu"))
    main()
    leave_distributed(together=True)
