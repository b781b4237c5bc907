"""Each optimizer follows its equation in float64, on one rank, on two, and on a mesh of two by two."""

import importlib.util
from pathlib import Path

import optimizer_case
import pytest
import synthetic
import torch

from tandem.config.optim import OptimConfig
from tandem.engines.train.gradients import gradient_norm
from tandem.engines.train.muon import orthogonalised
from tandem.engines.train.optimizers import build_optimizers, weight_kinds
from tandem.errors import CheckpointError, ConfigError
from tandem.models.collectives import CollectiveMeter
from tests.support.ranks import run_ranks

JOBS = {2: "optimizer_job.py", 4: "mesh_job.py"}
CHOICES = tuple(optimizer_case.CHOICES)
MUON = {"optimizer": "muon"}
STATES = optimizer_case.STATES


@pytest.fixture(scope="module")
def single(folder, tmp_path_factory):
    """Return checkpoints of one rank after a step, and weights after two steps, by optimizer."""
    saved, weights = tmp_path_factory.mktemp("one_rank"), {}
    loss, micro = synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    for choice in STATES:
        engine = synthetic.make_engine(folder, optim=optimizer_case.CHOICES[choice])
        engine.train_step(synthetic.make_batch(), loss, micro=micro)
        engine.save(saved / choice)
        engine.train_step(synthetic.make_batch(), loss, micro=micro)
        weights[choice] = synthetic.weights(engine)
    return saved, weights


@pytest.fixture(scope="module", params=[pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4)])
def many(request, folder, single, tmp_path_factory):
    """Return the number of ranks, their results, and the folder of the results."""
    results = tmp_path_factory.mktemp("results")
    job = Path(__file__).with_name(JOBS[request.param])
    arguments = (folder, single[0]) if request.param == 2 else ()
    run_ranks(job, results, *arguments, ranks=request.param)
    return request.param, torch.load(results / "record.pt", weights_only=False), results


def largest_difference(first, second):
    assert set(first) == set(second)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.parametrize("choice", CHOICES)
def test_five_steps_follow_the_equation(choice):
    module = optimizer_case.make_module()
    optimizer_case.run(module, optimizer_case.optim(choice))
    found = {name: p.detach() for name, p in module.named_parameters()}
    wanted = optimizer_case.reference(choice)
    assert largest_difference(found, wanted) < 1e-11
    start = {name: p.detach() for name, p in optimizer_case.make_module().named_parameters()}
    assert all(float((found[name] - start[name]).abs().min()) > 1e-6 for name in found)


def test_choices_differ():
    """The references differ, so that no optimizer can pass for another.

    They differ in weight decay, in muon, and in the weights that muon leaves to AdamW.
    """
    adamw, muon, everywhere = (optimizer_case.reference(c) for c in ("adamw", "muon", "all decay"))
    differ = {name for name in adamw if not torch.equal(adamw[name], muon[name])}
    assert differ == optimizer_case.HIDDEN
    assert {n for n in adamw if not torch.equal(adamw[n], everywhere[n])} == optimizer_case.SPARED


def test_many_ranks_do_what_one_does(many):
    ranks, record, _ = many
    assert set(record["optimizers"]) == set(optimizer_case.SHARDED[ranks])
    for choice, (weights, received) in record["optimizers"].items():
        assert largest_difference(weights, optimizer_case.reference(choice)) < 1e-11, choice
        assert (received > 0) == (choice == "muon")


def test_muon_sends_each_matrix_to_one_rank_and_back(many):
    """Count what the first of two ranks receives for each pair of matrices of equal size.

    It receives the other rank's rows of its own matrix, and gets its rows of the other matrix back. `up` has
    21 rows, 10 of them on the second rank; `down` has 8.
    """
    ranks, record, _ = many
    if ranks == 2:
        up_and_down, squares = 10 * 8 + 4 * 21, 4 * 8 + 4 * 8
        numbers = len(optimizer_case.RATES) * (2 * up_and_down + squares)
        assert record["optimizers"]["muon"][1] == 8 * numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_element_of_the_gradient_counts_once(many, dtype):
    ranks, record, _ = many
    found, clipped, layouts = record["norms"][dtype]
    whole = optimizer_case.gradients(0, optimizer_case.make_module(dtype))
    wanted = sum(float(g.double().square().sum()) for g in whole.values()) ** 0.5
    assert found == pytest.approx(wanted, rel=1e-14 if dtype == torch.float64 else 1e-6)
    scaled = {name: g.double() / (wanted + 1e-6) for name, g in whole.items()}
    assert largest_difference(clipped, scaled) < (1e-15 if dtype == torch.float64 else 1e-7)
    rows, columns = "Shard(dim=0)", "Shard(dim=1)"
    split = {f"(_StridedShard(dim=0, sf=2), {rows})", f"({rows}, {columns})", f"({rows}, Replicate())"}
    assert set(layouts) == {f"({rows},)", *(split if ranks == 4 else ())}


def test_the_norm_of_a_long_gradient_keeps_its_digits():
    """A plain fp32 norm of this many numbers has an error of more than 1e-5."""
    gradient = torch.randn(2**22, generator=torch.Generator().manual_seed(0)) + 1
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    found = gradient_norm([parameter])
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


@pytest.mark.parametrize("choice", STATES)
def test_resume_is_bit_identical_on_two_ranks_and_takes_one_ranks_checkpoint(single, many, choice):
    ranks, record, _ = many
    if ranks == 2:
        straight, resumed, from_one = record["resumed"][choice]
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)
        assert synthetic.relative_difference(from_one, single[1][choice]) < 1e-9


@pytest.mark.parametrize("choice", STATES)
def test_one_rank_resumes_its_own_checkpoint_and_that_of_two(folder, single, many, choice):
    ranks, _, results = many
    if ranks == 2:
        saved, weights = single
        loss, micro = synthetic.SyntheticLoss(), synthetic.CUTS["three"]
        for path, tolerance in ((saved / choice, 0.0), (results / choice, 1e-9)):
            engine = synthetic.make_engine(folder, optim=optimizer_case.CHOICES[choice])
            engine.load(path)
            assert engine.version == 1
            engine.train_step(synthetic.make_batch(), loss, micro=micro)
            assert synthetic.relative_difference(synthetic.weights(engine), weights[choice]) <= tolerance


def test_a_checkpoint_of_another_optimizer_is_refused(folder, single):
    engine = synthetic.make_engine(folder, optim=MUON)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.load(single[0] / "adamw")
    synthetic.make_engine(folder, optim={"optimizer": "adamw_cpu"}).load(single[0] / "adamw")


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
    given = [optimizer_case.gradients(step, optimizer_case.make_module()) for step in range(5)]
    (optimizer,), _ = optimizer_case.run(
        module, optimizer_case.optim(choice), lambda value, _: value.cuda(), given
    )
    found = {name: p.detach().cpu() for name, p in module.named_parameters()}
    assert largest_difference(found, optimizer_case.reference(choice)) < 1e-11
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}


def test_fused_is_a_choice():
    for fused in (True, False):
        module = optimizer_case.make_module()
        (optimizer,) = build_optimizers(module, module.layers, OptimConfig(fused=fused), CollectiveMeter())
        assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(fused, not fused)] * 2
