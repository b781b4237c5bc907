"""Each optimizer follows its equation in float64, on one rank, on two, and on a mesh of two by two."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tandem.config.optim import OptimConfig
from tandem.engines.train.gradients import clip, gradient_norm
from tandem.engines.train.muon import orthogonalised
from tandem.engines.train.optimizers import build_optimizers, weight_kinds
from tandem.errors import CheckpointError, ConfigError
from tandem.models.collectives import CollectiveMeter
from tests.engines.train import optimizer_case, synthetic
from tests.engines.train.on_ranks import on_ranks

# On two ranks the rows of all weights are divided. On a mesh of two by two the layers are split too.


def sharded(dtype=torch.float64):
    """Return the module on the mesh of all ranks."""
    module = optimizer_case.make_module(dtype)
    if dist.get_world_size() == 2:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        for layer in module.layers:
            parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (*module.layers, module):
        fully_shard(part, mesh=mesh)
    return module


def place(value, parameter):
    return distribute_tensor(value.clone(), parameter.device_mesh, parameter.placements, src_data_rank=None)


def full(value):
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def updated(choice):
    """Return the weights after all steps, and the bytes that the optimizer received."""
    module = sharded()
    _, meter = optimizer_case.run(module, optimizer_case.optim(choice), place)
    return {name: full(p.detach()) for name, p in module.named_parameters()}, meter.take()[1]


def norms(dtype):
    """Return the gradient norm, the gradients clipped to norm 1, and the placements of the parameters."""
    module = sharded(dtype)
    for name, value in optimizer_case.gradients(0, optimizer_case.make_module(dtype)).items():
        parameter = module.get_parameter(name)
        parameter.grad = place(value, parameter)
    before = gradient_norm(module.parameters())
    clip(module.parameters(), before, 1.0)
    clipped = {name: full(p.grad) for name, p in module.named_parameters()}
    return float(before), clipped, {str(p.placements) for p in module.parameters()}


def on_a_mesh():
    choices = optimizer_case.SHARDED[dist.get_world_size()]
    found = {choice: updated(choice) for choice in choices}
    return {"optimizers": found, "norms": {dtype: norms(dtype) for dtype in (torch.float64, torch.float32)}}


@pytest.fixture(scope="module", params=[pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4)])
def many(request):
    """Return the number of ranks and the results of the first."""
    return request.param, on_ranks(on_a_mesh, ranks=request.param)[0]


def largest_difference(first, second):
    assert set(first) == set(second)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.parametrize("choice", optimizer_case.CHOICES)
def test_five_steps_follow_the_equation(choice):
    module = optimizer_case.make_module()
    optimizer_case.run(module, optimizer_case.optim(choice))
    found = {name: p.detach() for name, p in module.named_parameters()}
    wanted = optimizer_case.reference(choice)
    assert largest_difference(found, wanted) < 1e-11
    start = {name: p.detach() for name, p in optimizer_case.make_module().named_parameters()}
    assert all(float((found[name] - start[name]).abs().min()) > 1e-6 for name in found)


def test_many_ranks_do_what_one_does(many):
    ranks, record = many
    assert set(record["optimizers"]) == set(optimizer_case.SHARDED[ranks])
    for choice, (weights, received) in record["optimizers"].items():
        assert largest_difference(weights, optimizer_case.reference(choice)) < 1e-11, choice
        assert (received > 0) == (choice == "muon")


def test_muon_sends_each_matrix_to_one_rank_and_back(many):
    """Count what the first of two ranks receives for each pair of matrices of equal size.

    It receives the other rank's rows of its own matrix, and gets its rows of the other matrix back. `up` has
    21 rows, 10 of them on the second rank; `down` has 8.
    """
    ranks, record = many
    if ranks == 2:
        up_and_down, squares = 10 * 8 + 4 * 21, 4 * 8 + 4 * 8
        numbers = len(optimizer_case.RATES) * (2 * up_and_down + squares)
        assert record["optimizers"]["muon"][1] == 8 * numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_element_of_the_gradient_counts_once(many, dtype):
    ranks, record = many
    found, clipped, layouts = record["norms"][dtype]
    whole = optimizer_case.gradients(0, optimizer_case.make_module(dtype))
    wanted = sum(float(g.double().square().sum()) for g in whole.values()) ** 0.5
    assert found == pytest.approx(wanted, rel=1e-14 if dtype == torch.float64 else 1e-6)
    scaled = {name: g.double() / (wanted + 1e-6) for name, g in whole.items()}
    assert largest_difference(clipped, scaled) < (1e-15 if dtype == torch.float64 else 1e-7)
    rows, columns = "Shard(dim=0)", "Shard(dim=1)"
    split = {f"(_StridedShard(dim=0, sf=2), {rows})", f"({rows}, {columns})", f"({rows}, Replicate())"}
    assert layouts == {f"({rows},)", *(split if ranks == 4 else ())}


def test_the_norm_of_a_long_gradient_keeps_its_digits():
    """A plain fp32 norm of this many numbers has an error of more than 1e-5."""
    gradient = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) + 1
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    found = gradient_norm([parameter])
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def test_a_checkpoint_of_another_optimizer_is_refused(folder, tmp_path):
    synthetic.make_engine(folder).save(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        synthetic.make_engine(folder, optim={"optimizer": "muon"}).load(tmp_path)
    synthetic.make_engine(folder, optim={"optimizer": "adamw_cpu"}).load(tmp_path)


def test_orthogonalised_against_the_singular_value_decomposition():
    for shape in ((30, 12), (12, 30), (16, 16)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = orthogonalised(matrix)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        within = left.T @ found @ right.T
        assert (within - within.diagonal().diag()).abs().max() < 1e-12
        assert within.diagonal().min() > 0.6 and within.diagonal().max() < 1.25
        assert values.max() / values.min() > 2


def test_state_is_there_before_the_first_step(folder):
    """In float64, AdamW has two moments and muon has one. Each AdamW weight also has a counter of 4 bytes."""
    counts = {}
    for name in ("adamw", "muon"):
        engine = synthetic.make_engine(folder, optim={"optimizer": name})
        hidden = [
            p.numel() for layer in engine.module.decoder.layers for p in layer.parameters() if p.ndim == 2
        ]
        counts[name] = engine.state_info()["optimizer@cpu"], sum(hidden), len(hidden)
        weights = list(engine.module.parameters())
    whole, tensors = sum(p.numel() for p in weights), len(weights)
    assert counts["adamw"][0] == 16 * whole + 4 * tensors
    found, hidden, matrices = counts["muon"]
    assert hidden > 0 and found == 16 * (whole - hidden) + 4 * (tensors - matrices) + 8 * hidden


def test_kinds_of_a_models_weights(folder):
    module = synthetic.make_engine(folder, frozen=True).module
    kinds = weight_kinds(module)
    by_name = {name: kinds[parameter] for name, parameter in module.named_parameters()}
    assert {kind for name, kind in by_name.items() if "norm" in name} == {"norm"}
    assert {kind for name, kind in by_name.items() if name.endswith("bias")} == {"bias"}
    assert [name for name, kind in by_name.items() if kind == "embedding"] == [
        "model.model.embed_tokens.weight"
    ]
    others = {name.split(".")[-2] for name, kind in by_name.items() if kind == "other"}
    assert others == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_a_missing_library_is_said_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="not installed") as caught:
        synthetic.make_engine(tmp_path / "no_model", optim={"optimizer": "adamw_8bit"})
    assert caught.value.field == "optim.optimizer"
    assert "pip install torchao" in str(caught.value.remedy)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_the_host_updates_what_lies_on_a_gpu(fused):
    choice = "adamw_cpu" if fused else "adamw_cpu foreach"
    module = optimizer_case.make_module().cuda()
    (optimizer,), _ = optimizer_case.run(module, optimizer_case.optim(choice), lambda value, _: value.cuda())
    found = {name: p.detach().cpu() for name, p in module.named_parameters()}
    assert largest_difference(found, optimizer_case.reference(choice)) < 1e-11
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}


def test_fused_is_a_choice():
    for fused in (True, False):
        module = optimizer_case.make_module()
        (optimizer,) = build_optimizers(module, module.layers, OptimConfig(fused=fused), CollectiveMeter())
        assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(fused, not fused)] * 2
