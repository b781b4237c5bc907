"""A job for two ranks that trains, saves, resumes and counts collectives with FSDP.

Arguments: FOLDER of the model, SAVED checkpoint of a single rank, RESULTS folder.
"""

import itertools
import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.engines.train.base import MicroBatching
from tandem.engines.train.microbatch import cut_alike
from tandem.models.collectives import CollectiveMeter
from tandem.models.parallel import leave_distributed

SHARES = {"uneven": (7, 10), "empty": (10, 10)}  # start and end of the second rank's rows


def my_rows(batch, share):
    begin, end = SHARES[share]
    return batch[:begin] if dist.get_rank() == 0 else batch[begin:end]


CASES = {
    "fp64": [
        *itertools.product(["uneven"], synthetic.MODES, synthetic.CUTS),
        ("empty", "token-mean", "three"),
        ("empty", "seq-mean-token-mean", "all"),
    ],
    "fp32": [("uneven", mode, "three") for mode in synthetic.MODES],
}


def all_gradients(folder, precision):
    engine = synthetic.make_engine(folder, precision=precision)
    batch = synthetic.make_batch(torch.float64 if precision == "fp64" else torch.float32)
    found = {}
    for share, mode, cut in CASES[precision]:
        loss, micro = synthetic.SyntheticLoss(mode), synthetic.CUTS[cut]
        found[precision, share, mode, cut] = synthetic.gradients(engine, my_rows(batch, share), loss, micro)
    return engine, found


def cuts():
    """Return the sizes of both ranks' micro-batches of rows of 12 and 6 tokens, under two rules."""
    lengths = [12] * 5 if dist.get_rank() == 0 else [6] * 4
    found = {}
    for name, micro in (("tokens", MicroBatching(max_tokens=30)), ("samples", MicroBatching(max_samples=2))):
        parts = [None, None]
        dist.all_gather_object(parts, cut_alike(lengths, micro, CollectiveMeter()))
        found[name] = [[len(rows) for rows in own] for own in parts]
    return found


def forwards(engine):
    """Return the outputs of both ranks' rows in the order in which they came back."""
    batch = my_rows(synthetic.make_batch(), "uneven")
    out = engine.forward(batch, outputs=frozenset({"log_probs"}), micro=synthetic.CUTS["three"]).ragged(
        "log_probs"
    )
    parts = [None, None]
    dist.all_gather_object(parts, out.values)
    return torch.cat(parts)


def checkpoints(folder, saved, results):
    """Return the weights after steps of a saved, a resumed and another resumed engine.

    The last one resumes from the checkpoint of a single rank.
    """
    batch = my_rows(synthetic.make_batch(), "uneven")
    loss, micro = synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    engine = synthetic.make_engine(folder)
    engine.train_step(batch, loss, micro=micro)
    engine.save(results / "two_ranks")
    engine.train_step(batch, loss, micro=micro)
    straight = synthetic.weights(engine)
    engine.load(results / "two_ranks")
    version = engine.version
    engine.train_step(batch, loss, micro=micro)
    resumed = synthetic.weights(engine)
    other = synthetic.make_engine(folder)
    other.load(saved)
    other.train_step(batch, loss, micro=micro)
    return {
        "straight": straight,
        "resumed": resumed,
        "version": version,
        "from_one_rank": synthetic.weights(other),
    }


def non_finite(engine):
    """Return the error on each rank when only one rank has a bad loss."""
    batch = my_rows(synthetic.make_batch(), "uneven")
    loss = synthetic.SyntheticLoss(scale=float("nan") if dist.get_rank() == 1 else 1.0)
    try:
        engine.train_step(batch, loss, micro=synthetic.CUTS["all"])
        name = "none"
    except ArithmeticError as error:
        name = f"{type(error).__name__} {error.field}"
    names = [None, None]
    dist.all_gather_object(names, name)
    return names


def unsharded_sum(engine):
    """Return the whole embedding on this rank, as a rollout sees it."""
    with engine.unsharded() as module:
        return module.get_input_embeddings().weight.detach().clone()


def collectives(folder):
    """Return the counted collectives of a forward and of a training step, and the sizes to check them with.

    Each has one micro-batch, in float64 and in bf16 over fp32.
    """
    batch, micro = my_rows(synthetic.make_batch(), "uneven"), synthetic.CUTS["all"]
    record = {}
    for name, fsdp in {"fp64": {}, "mixed": {"model_dtype": "fp32", "dtype": "bf16"}}.items():
        engine = synthetic.make_engine(folder, fsdp=fsdp)
        warmed_up = engine.take_collectives()
        engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro)
        forward = engine.take_collectives()
        metrics = engine.train_step(batch, synthetic.SyntheticLoss(), micro=micro)
        step = engine.take_collectives()
        weights = sum(value.nbytes for _, value in engine.weights())
        record[name] = {
            "warmed_up": warmed_up,
            "forward": forward,
            "step": step,
            "weights": engine.take_collectives(),
            "left": engine.take_collectives(),
            "numbers": {unit: synthetic.shard_numbers(p) for unit, p in synthetic.units(engine).items()},
            "metrics": len(metrics) - 2,  # grad_norm and lr need no exchange
            "whole": weights,
            "own": sum(p.to_local().nbytes for p in engine.module.parameters()),
        }
    return record


def synchronized(folder):
    """Return the gradients of three micro-batches, reduced once or in each, and the bytes exchanged."""
    batch, micro = my_rows(synthetic.make_batch(), "uneven"), synthetic.CUTS["three"]
    record = {}
    for sync in ("once", "each"):
        engine = synthetic.make_engine(folder, fsdp={"gradient_sync": sync})
        engine.take_collectives()
        gradient, metrics = synthetic.gradients(engine, batch, synthetic.SyntheticLoss(), micro)
        record[sync] = gradient, metrics, engine.take_collectives()[1]
    return record


def loaded_weights(folder):
    """Load another engine's weights into an engine of zeros, and return its weights and version."""
    source = synthetic.make_engine(folder)
    batch, micro = my_rows(synthetic.make_batch(), "uneven"), synthetic.CUTS["all"]
    source.train_step(batch, synthetic.SyntheticLoss(), micro=micro)
    target = synthetic.make_engine(folder, frozen=True)
    for parameter in target.module.parameters():
        parameter.detach().zero_()
    exported = synthetic.weights(source)
    target.load_weights(reversed(exported.items()), source.version)
    outputs = frozenset({"log_probs"})
    found = target.forward(batch, outputs=outputs, micro=micro).ragged("log_probs").values
    wanted = source.forward(batch, outputs=outputs, micro=micro).ragged("log_probs").values
    return {
        "exported": exported,
        "loaded": synthetic.weights(target),
        "version": target.version,
        "same_outputs": torch.equal(found, wanted),
    }


def main():
    folder, saved, results = (Path(argument) for argument in sys.argv[1:])
    engine, found = all_gradients(folder, "fp64")
    record = {
        "gradients": found | all_gradients(folder, "fp32")[1],
        "forward": forwards(engine),
        "cuts": cuts(),
        "checkpoints": checkpoints(folder, saved, results),
        "non_finite": non_finite(engine),
        "unsharded": unsharded_sum(engine),
        "info": engine.state_info(),
        "collectives": collectives(folder),
        "synchronized": synchronized(folder),
        "loaded": loaded_weights(folder),
    }
    if dist.get_rank() == 0:
        torch.save(record, results / "record.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
