"""A job that trains with layers in pipeline stages; each data-parallel rank takes its share of the rows.

Arguments: FOLDER of models, SAVED checkpoints of a single rank, RESULTS folder, CASES.
"""

import sys
from pathlib import Path

import pipeline_models
import split_models
import synthetic
import torch
import torch.distributed as dist

from tandem.engines.weight_sync import checksum
from tandem.errors import EngineError, TandemError
from tandem.models import weight_files
from tandem.models.parallel import init_distributed, leave_distributed

PIPE = pipeline_models.PIPE


def gathered(value):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def my_rows(engine, batch, *, empty=False):
    """Return this rank's rows.

    Shares are uneven: of two or more, the last has one row, or none if `empty`.
    """
    size, rank = engine.share.size, engine.share.rank
    ends = [len(batch) * (i + 1) // size for i in range(size)]
    if size > 1:
        ends[-2] = len(batch) - (not empty)
    return batch[ends[rank - 1] if rank else 0 : ends[rank]]


def trained(folder, case):
    kind, precision = case[1:3]
    engine = pipeline_models.engine_of(folder, *case)
    started = synthetic.weights(engine)
    metrics, forward = split_models.train(engine, my_rows(engine, split_models.batch_of(precision)), kind)
    parts = gathered((engine.share, metrics, forward))
    led = [part for part in sorted(parts, key=lambda part: part[0].rank) if part[0].leads]
    return {
        "started": started,
        "metrics": metrics,
        "same_metrics": all(other == metrics for _, other, _ in parts),
        "forward": {key: torch.cat([found[key] for _, _, found in led]) for key in forward},
        "same_forward": all(
            torch.equal(found[key], led[share.rank][2][key]) for share, _, found in parts for key in forward
        ),
        "weights": synthetic.weights(engine),
        "same_weights": gathered(weight_sums(engine)),
        "shapes": engine.weight_shapes,
        "digests": gathered(engine.digest()),
        "half": gathered(engine.digest(torch.bfloat16)),
        "infos": gathered(engine.state_info()),
        "embeddings": [sums for sums in gathered(embedding(engine)) if sums],
        "collectives": engine.take_collectives(),
    }


def weight_sums(engine):
    """Return names and checksums, in order, of the weights as a rollout receives them."""
    return [(name, int(checksum(value))) for name, value in engine.weights(dtype=torch.bfloat16)]


def embedding(engine):
    """Return the place of this rank's part of the embedding among the shards, and its checksum.

    Return None if this rank has no part.
    """
    weight = engine.module.decoder.embed_tokens.weight
    if weight is None:
        return None
    place = tuple(engine.grid.weights[name].get_local_rank() for name in ("shard", "tp"))
    return place, int(checksum(weight.to_local()))


def steps(folder, case, *, micro="three", empty=False, **more):
    """Take two steps and return their metrics and the weights after them."""
    engine = pipeline_models.engine_of(folder, *case, **more)
    rows = my_rows(engine, split_models.batch_of("fp64"), empty=empty)
    loss, _ = split_models.loss_and_outputs("policy")
    cut = pipeline_models.LOTS.get(micro, synthetic.CUTS["three"])
    metrics = [engine.train_step(rows, loss, micro=cut).to_floats() for _ in range(2)]
    return metrics, synthetic.weights(engine)


def exchanged(folder):
    """Load weights into an engine of zeros from another engine whose ranks hold other parts."""
    source = pipeline_models.engine_of(folder, "qwen2", "policy", "fp64", {}, {})
    target = pipeline_models.engine_of(folder, "qwen2", "policy", "fp64", PIPE, {}, frozen=True)
    for parameter in target.module.parameters():
        parameter.detach().zero_()
    exported = synthetic.weights(source)
    target.load_weights(reversed(exported.items()), 7)
    said = {}
    for what, names in (("missing", list(exported)[1:]), ("unknown", [*exported, "model.more"])):
        try:
            target.load_weights([(name, exported.get(name, torch.zeros(1))) for name in names], 8)
        except EngineError as error:
            said[what] = str(error)
    return {
        "exported": exported,
        "loaded": synthetic.weights(target),
        "some": [name for name, _ in target.weights(names=list(exported)[3:5])],
        "version": target.version,
        "same_digest": gathered(target.digest() == source.digest()),
        "said": gathered(said),
    }


def resumed(folder, saved, results, names, into):
    """Load checkpoints under each division, take one step, and return weights and version.

    The checkpoints come from a single rank and from the other division, with pipeline stages or without.
    """
    found = {}
    for name in names:
        cases = {"sharded": (name, "policy", "fp64", {}, {}), "staged": (name, "policy", "fp64", PIPE, {})}
        sources = {"one": saved / name}
        for label, case in cases.items():
            engine = pipeline_models.engine_of(folder, *case)
            engine.load(saved / name)
            sources[label] = results / f"{name}_{label}"
            engine.stage(sources[label])() if label == "staged" else engine.save(sources[label])
        for label in into:
            for source, path in sources.items():
                engine = pipeline_models.engine_of(folder, *cases[label])
                engine.load(path)
                rows = my_rows(engine, split_models.batch_of("fp64"))
                split_models.train(engine, rows, "policy", steps=1)
                found[name, source, label] = synthetic.weights(engine), engine.version
    return found


def scored(folder):
    """Return the scores of all rows by a reward model in pipeline stages."""
    engine = pipeline_models.engine_of(folder, "scorer", "score", "fp64", PIPE, {}, frozen=True)
    rows = my_rows(engine, split_models.batch_of("fp64"))
    out = engine.forward(rows, outputs=frozenset({"scores"}), micro=synthetic.CUTS["one"])
    parts = gathered((engine.share, out.ragged("scores").values))
    return torch.cat([found for share, found in sorted(parts, key=lambda part: part[0].rank) if share.leads])


def read_names(folder):
    """Return the names that each rank reads from the model's files."""
    names, read = set(), weight_files._read

    def noted(handle, name, part):
        names.add(name)
        return read(handle, name, part)

    weight_files._read = noted
    try:
        engine = pipeline_models.engine_of(folder, "deep", "policy", "fp64", PIPE, {}, frozen=True)
    finally:
        weight_files._read = read
    return gathered((engine.grid.weights["pp"].get_local_rank(), names))


def refusals(folder):
    """Return the engine's messages for what it cannot do."""
    said = {}
    engine = pipeline_models.engine_of(folder, "qwen2", "policy", "fp64", PIPE, {}, frozen=True)
    try:
        with engine.unsharded():
            said["unsharded"] = "shared"
    except EngineError as error:
        said["unsharded"] = str(error)
    said["unshards"] = engine.unshards
    try:
        engine.forward(
            split_models.batch_of("fp64"), outputs=frozenset({"values"}), micro=synthetic.CUTS["one"]
        )
    except EngineError as error:
        said["output"] = str(error)
    for what, stages, model in (
        ("ranks", 3, {}),
        ("layers", 4, {}),
        ("activations", 2, {"enable_activation_offload": True}),
    ):
        try:
            pipeline_models.engine_of(
                folder, "qwen2", "policy", "fp64", {"pipeline_parallel_size": stages}, {"model": model}
            )
        except TandemError as error:
            said[what] = error.field, str(error)
    return gathered(said)


def main():
    folder, saved, results = (Path(argument) for argument in sys.argv[1:4])
    cases = getattr(pipeline_models, sys.argv[4])
    core = sys.argv[4] == "CORE"
    passed_on = (["qwen2"], ["staged"]) if core else (["qwen2", "qwen3"], ["sharded", "staged"])
    tied = cases["tied"]
    record = {
        "trained": {name: trained(folder, case) for name, case in cases.items()},
        "lots": {name: steps(folder, tied, micro=name) for name in pipeline_models.LOTS},
        "empty": steps(folder, tied, empty=True),
        "recomputed": steps(folder, cases["uneven stages"], **pipeline_models.RECOMPUTED),
        "each": steps(folder, (*tied[:3], {**PIPE, "gradient_sync": "each"}, {})),
        "muon": steps(folder, tied, **pipeline_models.MUON),
        "mixed": steps(folder, (*tied[:3], {**PIPE, **split_models.MIXED}, {})),
        "exchanged": exchanged(folder),
        "scored": scored(folder),
        "read": read_names(folder),
        "resumed": resumed(folder, saved, results, *passed_on),
        "refusals": refusals(folder),
    }
    if dist.get_rank() == 0:
        torch.save(record, results / "record.pt")


if __name__ == "__main__":
    init_distributed(torch.device("cpu"), timeout_s=120)
    main()
    leave_distributed(together=True)
