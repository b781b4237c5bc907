"""A job for two ranks that trains adapters under every division of the model.

It also loads a checkpoint of one rank and saves it again. Arguments: FOLDER of a model, SAVED checkpoint of
one rank, RESULTS folder, CASES.
"""

import sys
from pathlib import Path

import lora_models
import synthetic
import torch
import torch.distributed as dist
from split_job import gathered, my_rows

from tandem.engines.weight_sync import digest
from tandem.models.parallel import init_distributed, leave_distributed


def trained(folder, division):
    kind = division[0]
    engine = lora_models.engine_of(folder, *division)
    rows = my_rows(engine, lora_models.batch())
    drawn = lora_models.adapters(engine)
    metrics, forward = lora_models.train(engine, rows, kind)
    weights = synthetic.weights(engine)
    half = digest(engine.weights(dtype=torch.bfloat16))
    same_base = kind == "value" or torch.equal(
        lora_models.base_log_probs(engine, rows),
        lora_models.plain_log_probs(folder, rows, *division[1:4]),
    )
    parts = gathered((engine.share, forward))
    led = [found for share, found in sorted(parts, key=lambda part: part[0].rank) if share.leads]
    return {
        "drawn": drawn,
        "metrics": metrics,
        "forward": {key: torch.cat([found[key] for found in led]) for key in forward},
        "weights": weights,
        "shapes": engine.weight_shapes,
        "digests": gathered(
            (engine.digest() == digest(weights.items()), engine.digest(torch.bfloat16) == half)
        ),
        "same base": gathered(same_base),
        "info": engine.state_info(),
        "unshards": engine.unshards,
        "adapters": lora_models.adapters(engine),
    }


def resumed(folder, saved, results):
    """Load one rank's checkpoint, save it again, take a step, and return version and adapters."""
    found = {}
    for name in ("sharded", "tensor"):
        division = lora_models.DIVISIONS[name]
        engine = lora_models.engine_of(folder, *division)
        engine.load(saved)
        engine.save(results / name)
        rows = my_rows(engine, lora_models.batch())
        lora_models.train(engine, rows, "policy", steps=1)
        found[name] = engine.version, lora_models.adapters(engine)
    return found


def started(folder, adapter):
    """Return the weights of engines that start from an adapter folder in peft's format."""
    keys = {"lora_adapter_path": str(adapter)}
    found = {}
    for name in ("sharded", "tensor"):
        engine = lora_models.engine_of(folder, *lora_models.DIVISIONS[name][:4], keys)
        found[name] = synthetic.weights(engine)
    return found


def main():
    folder, saved, results = (Path(argument) for argument in sys.argv[1:4])
    cases = lora_models.CASES[sys.argv[4]]
    record = {"trained": {name: trained(folder, lora_models.DIVISIONS[name]) for name in cases}}
    record["resumed"] = resumed(folder, saved, results)
    record["started"] = started(folder, results / "adapter")
    if dist.get_rank() == 0:
        torch.save(record, results / "record.pt")


if __name__ == "__main__":
    init_distributed(torch.device("cpu"))
    main()
    leave_distributed(together=True)
