"""Learning rates by step, and each optimizer against its equation in float64, also on two and four ranks."""

import importlib.util
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from tandem.config.optim import OptimConfig
from tandem.engines.train.gradients import clip, gradient_norm
from tandem.engines.train.muon import orthogonalised
from tandem.engines.train.optim import learning_rate
from tandem.engines.train.optimizers import build_optimizers, weight_kinds
from tandem.errors import CheckpointError, ConfigError
from tandem.models.collectives import CollectiveMeter
from tests.engines.train import optimizer_case, synthetic
from tests.engines.train.on_ranks import on_ranks


def sharded(dtype=torch.float64):
    """Return the module on the mesh of all ranks: rows by two, and the layers by two if there are four."""
    module, (rows, layers) = optimizer_case.make_module(dtype), (2, dist.get_world_size() // 2)
    both = init_device_mesh("cpu", (rows, layers), mesh_dim_names=("dp", "tp"))
    for layer in module.layers if layers > 1 else ():
        parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (*module.layers, module):
        fully_shard(part, mesh=both["dp"])
    return module


def place(value, parameter):
    return distribute_tensor(value.clone(), parameter.device_mesh, parameter.placements, src_data_rank=None)


def full(value):
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def updated(choice):
    module = sharded()
    _, meter = optimizer_case.run(module, optimizer_case.optim(choice), place)
    return {name: full(p.detach()) for name, p in module.named_parameters()}, meter.take()[1]


def norms(dtype):
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
    return request.param, on_ranks(on_a_mesh, ranks=request.param)[0]


def largest_difference(first, second):
    assert set(first) == set(second)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.parametrize("choice", optimizer_case.CHOICES)
def test_five_steps_follow_the_equation(choice):
    module = optimizer_case.make_module()
    optimizer_case.run(module, optimizer_case.optim(choice))
    found = {name: p.detach() for name, p in module.named_parameters()}
    assert largest_difference(found, optimizer_case.reference(choice)) < 1e-11
    start = dict(optimizer_case.make_module().named_parameters())
    assert all((found[name] - start[name]).abs().min() > 1e-6 for name in found)


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


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (16, 16)])
def test_orthogonalised_against_the_singular_value_decomposition(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    within = left.T @ orthogonalised(matrix) @ right.T
    assert (within - within.diagonal().diag()).abs().max() < 1e-12
    assert within.diagonal().min() > 0.6 and within.diagonal().max() < 1.25
    assert values.max() / values.min() > 2


def test_state_is_there_before_the_first_step(folder):
    """In float64, AdamW has two moments and muon has one. Each AdamW weight also has a counter of 4 bytes."""
    for name in ("adamw", "muon"):
        engine = synthetic.make_engine(folder, optim={"optimizer": name})
        layers = [p for layer in engine.module.decoder.layers for p in layer.parameters()]
        one = [p.numel() for p in layers if p.ndim == 2 and name == "muon"]
        two = sum(p.numel() for p in engine.module.parameters()) - sum(one)
        counters = len(list(engine.module.parameters())) - len(one)
        assert engine.state_info()["optimizer@cpu"] == 16 * two + 8 * sum(one) + 4 * counters
    assert one


def test_kinds_of_a_models_weights(folder):
    module = synthetic.make_engine(folder, frozen=True).module
    for name, kind in ((name, weight_kinds(module)[p]) for name, p in module.named_parameters()):
        *_, owner, last = name.split(".")
        expected = "norm" if "norm" in owner else "embedding" if owner == "embed_tokens" else "other"
        assert kind == ("bias" if last == "bias" else expected), name


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


def rates(total, **options):
    optim = OptimConfig(lr=2.0, **options)
    return [learning_rate(optim, step, total) for step in range(total + 2)]


WSD, STEEP = {"lr_scheduler_type": "wsd"}, {"lr_scheduler_type": "wsd", "lr_wsd_decay_style": "linear"}
HALF = {**STEEP, "lr_wsd_decay_ratio": 0.5}


@pytest.mark.parametrize(
    ("total", "options", "wanted"),
    [
        (3, {}, [2.0] * 5),
        (8, {"lr_warmup_steps": 4}, [0, 0.5, 1.0, 1.5, *[2.0] * 6]),
        (8, {"lr_warmup_steps_ratio": 0.5}, [0, 0.5, 1.0, 1.5, *[2.0] * 6]),
        (8, {"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, [2.0] * 10),
        (6, {"lr_scheduler_type": "linear", "lr_warmup_steps": 2, "min_lr_ratio": 0.25},
         [0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.5, 0.5]),
        (8, HALF, [2.0] * 5 + [1.5, 1.0, 0.5, 0.0, 0.0]),
        (8, {**HALF, "lr_warmup_steps": 2, "min_lr_ratio": 0.5},
         [0.0, 1.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]),
        (4, {**STEEP, "lr_warmup_steps": 2, "lr_wsd_decay_ratio": 1.0}, [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]),
        (20, STEEP, [2.0] * 19 + [1.0, 0.0, 0.0]),  # over a tenth unless told
    ],
)  # fmt: skip
def test_rates_by_hand(total, options, wanted):
    assert rates(total, **options) == wanted


def test_curves_end_at_their_floor():
    got = rates(4, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    parts = (0, 0.25, 0.5, 0.75, 1, 1)
    wanted = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2) for x in parts]
    assert got == pytest.approx(wanted, abs=1e-15)
    assert got[2] == pytest.approx(1.1) and got[4] == pytest.approx(0.2)
    root = rates(8, **WSD, lr_wsd_decay_ratio=0.5, min_lr_ratio=0.1)
    wanted = [2 * (0.1 + 0.9 * (1 - math.sqrt(y))) for y in parts]
    assert root[:4] == [2.0] * 4 and root[4:] == pytest.approx(wanted, abs=1e-15)


SPAN, QUARTER = {"num_training_steps": 20}, {"lr_wsd_decay_ratio": 0.25}
DECAY = {**SPAN, "num_decay_steps": 5}
SAME = {
    "constant": (get_constant_schedule_with_warmup, {}, {}),
    "linear": (get_linear_schedule_with_warmup, SPAN, {}),
    "cosine": (
        get_cosine_with_min_lr_schedule_with_warmup,
        SPAN | {"min_lr_rate": 0.1},
        {"min_lr_ratio": 0.1},
    ),
    "wsd": (get_wsd_schedule, DECAY | {"decay_type": "1-sqrt"}, QUARTER),
    "wsd linear": (get_wsd_schedule, DECAY | {"decay_type": "linear"}, STEEP | QUARTER),
}


@pytest.mark.parametrize("name", SAME)
def test_the_curves_are_transformers_own(name):
    make, theirs, ours = SAME[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=2.0)
    schedule = make(optimizer, num_warmup_steps=3, **theirs)
    wanted = []
    for _ in range(21):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    found = rates(20, **ours | {"lr_scheduler_type": name.split()[0], "lr_warmup_steps": 3})[:21]
    assert found == pytest.approx(wanted, abs=1e-12)
    assert len(set(found)) > 3
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", total_training_steps=10)
    assert learning_rate(optim, 5, 1000) == 0.5


@pytest.mark.parametrize(
    ("kind", "floor", "wanted"), [("constant", 0.0, [0.5, 1, 1, 1]), ("cosine", 0.1, [0.5, 1, 0.775, 0.325])]
)
def test_verls_test_lr_scheduler(kind, floor, wanted):
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=2, lr_scheduler_type=kind, min_lr_ratio=floor)
    assert [1e3 * learning_rate(optim, step, 5) for step in range(5)] == pytest.approx([0.0, *wanted])
