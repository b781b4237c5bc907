import itertools
import math
import statistics

import pytest
import torch
import torch.distributed as dist

from tandem.observability.metrics import Metrics

VALUES = [0.3, 1.7, -0.9, 1.1, 2.0, 0.0, 0.4]
WEIGHTS = [0.5, 0.25, 0.0, 2.0, 1.0, 0.75, 0.5]
NAN = math.nan


def observed(values, weights):
    metrics, tensor = Metrics(), torch.tensor(values, dtype=torch.float64)
    for value, weight in zip(tensor, weights, strict=True):
        metrics.add_sum("sum", value)
        metrics.add_mean("mean", value * weight, torch.tensor(weight, dtype=torch.float64))
        metrics.add_max("max", value)
        metrics.add_min("min", float(value))
    for reduction in ("std", "sample_std", "ess"):
        metrics.add_spread(reduction, reduction, tensor.sum(), tensor.square().sum(), len(values))
    return metrics


def expected():
    products = [value * weight for value, weight in zip(VALUES, WEIGHTS, strict=True)]
    return {
        "sum": math.fsum(VALUES),
        "mean": math.fsum(products) / math.fsum(WEIGHTS),
        "max": max(VALUES),
        "min": min(VALUES),
        "std": statistics.pstdev(VALUES),
        "sample_std": statistics.stdev(VALUES),
        "ess": sum(VALUES) ** 2 / len(VALUES) / sum(v * v for v in VALUES),
    }


@pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 4, 7], [0, 3, 3, 7]])
def test_parts_add_up_to_the_whole(cuts):
    parts = [observed(VALUES[a:b], WEIGHTS[a:b]) for a, b in itertools.pairwise(cuts)]
    assert Metrics.merged(parts).to_floats() == pytest.approx(expected(), rel=1e-12)


def _reduce_on_rank(rank, world_size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mine = slice(0, 5) if rank == 0 else slice(5, 7)
    metrics = observed(VALUES[mine], WEIGHTS[mine])
    metrics.add_mean("loss", torch.tensor(3.0 * rank), torch.tensor(float(rank)))  # of rank 1 alone
    reduced = metrics.all_reduced(None, torch.device("cpu")).to_floats()
    dist.destroy_process_group()
    assert reduced == pytest.approx(expected() | {"loss": 3.0}, rel=1e-12)


def test_two_ranks_add_up_to_the_whole(free_port):
    torch.multiprocessing.spawn(_reduce_on_rank, args=(2, free_port), nprocs=2)


def test_parts_with_different_names_are_united_and_a_mean_of_nothing_is_left_out():
    first, second = Metrics(), Metrics()
    first.add_sum("only/first", 2.0)
    first.add_mean("empty", torch.tensor(0.0), torch.tensor(0.0))
    second.add_mean("only/second", 6.0, 4)
    assert Metrics.merged([first, second]).to_floats() == {"only/first": 2.0, "only/second": 1.5}


def test_a_maximum_of_python_floats_keeps_double_precision():
    metrics = Metrics()
    metrics.add_max("x", 0.1)
    metrics.add_max("x", torch.tensor(-1.0))
    assert metrics.to_floats()["x"] == 0.1
    with pytest.raises(AssertionError):  # one name has one reduction
        metrics.add_sum("x", 1.0)


@pytest.mark.parametrize("add", ["add_max", "add_min", "add_sum"])
@pytest.mark.parametrize("order", [(NAN, 1.0), (1.0, NAN)])
def test_nan_is_not_lost_in_a_reduction(add, order):
    metrics = Metrics()
    for value in order:
        getattr(metrics, add)("x", value)
    assert math.isnan(metrics.to_floats()["x"])


def test_no_gradient_is_held():
    metrics, value = Metrics(), torch.ones((), requires_grad=True)
    metrics.add_mean("mean", value * 2, value)
    metrics.add_spread("spread", "std", value * 2, value * 4, value)
    held = [getattr(metrics[name], part) for name in ("mean", "spread") for part in ("value", "weight")]
    assert not any(torch.as_tensor(part).requires_grad for part in (*held, metrics["spread"].squares))


def test_the_edges_of_spreads():
    def spread(*values):
        found = observed(values, [1.0] * len(values)).to_floats()
        return {name: found[name] for name in ("std", "sample_std", "ess") if name in found}

    assert spread() == {}
    assert spread(3.0) == {"std": 0.0, "sample_std": 0.0, "ess": 1.0}
    assert spread(0.0, 0.0)["ess"] == 0.0
    assert spread(*[1.1] * 9)["std"] == pytest.approx(0, abs=1e-7)
    assert math.isnan(spread(1.0, NAN)["std"])
    assert observed(VALUES, WEIGHTS).reduced_bytes == 3 * 24 + 4 * 16
