"""A job that runs the optimizers on a device mesh. Argument: RESULTS folder.

On two ranks, the rows of all weights are divided. On four ranks, the layers are also split over a second
dimension of the 2 x 2 mesh.
"""

import sys
from pathlib import Path

import optimizer_case
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tandem.engines.train.gradients import clip, gradient_norm
from tandem.models.parallel import init_distributed, leave_distributed


def sharded(dtype=torch.float64):
    """Return the module on this job's mesh."""
    module, world = optimizer_case.make_module(dtype), dist.get_world_size()
    if world == 2:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in module.layers:
            parallelize_module(layer, both["tp"], plan)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def place(value, parameter):
    return distribute_tensor(value.clone(), parameter.device_mesh, parameter.placements, src_data_rank=None)


def full(value):
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def optimizers():
    given = [
        optimizer_case.gradients(step, optimizer_case.make_module())
        for step in range(len(optimizer_case.RATES))
    ]
    found = {}
    for choice in optimizer_case.SHARDED[dist.get_world_size()]:
        module = sharded()
        _, meter = optimizer_case.run(module, optimizer_case.optim(choice), place, given)
        weights = {name: full(p.detach()) for name, p in module.named_parameters()}
        found[choice] = weights, meter.take()[1]
    return found


def norms(dtype):
    """Return the gradient norm, the gradients clipped to norm 1, and the placements of the parameters."""
    module = sharded(dtype)
    for name, value in optimizer_case.gradients(0, optimizer_case.make_module(dtype)).items():
        parameter = module.get_parameter(name)
        parameter.grad = place(value, parameter)
    before = gradient_norm(module.parameters())
    clip(module.parameters(), before, 1.0)
    clipped = {name: full(p.grad) for name, p in module.named_parameters()}
    layouts = {str(p.placements) for p in module.parameters()}
    return float(before), clipped, sorted(layouts)


def record():
    return {
        "optimizers": optimizers(),
        "norms": {dtype: norms(dtype) for dtype in (torch.float64, torch.float32)},
    }


def main():
    init_distributed(torch.device("cpu"))
    found = record()
    if dist.get_rank() == 0:
        torch.save(found, Path(sys.argv[1]) / "record.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
