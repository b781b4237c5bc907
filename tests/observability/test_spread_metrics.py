import itertools
import math
import statistics

import pytest
import torch
import torch.distributed as dist

from tandem.observability.metrics import Metrics

VALUES = [0.3, 1.7, 0.9, 1.1, 2.0, 0.0, 0.4]


def observed(values: list[float]) -> Metrics:
    metrics, tensor = Metrics(), torch.tensor(values, dtype=torch.float64)
    for reduction in ("std", "sample_std", "ess"):
        metrics.add_spread(reduction, reduction, tensor.sum(), tensor.square().sum(), len(values))
    metrics.add_mean("mean", tensor.sum(), len(values))
    return metrics


def expected(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {
        "std": statistics.pstdev(values),
        "sample_std": statistics.stdev(values),
        "ess": mean**2 / (sum(v * v for v in values) / len(values)),
        "mean": mean,
    }


@pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 4, 7], [0, 3, 3, 7]])
def test_parts_add_up_to_the_whole(cuts):
    parts = [observed(VALUES[a:b]) for a, b in itertools.pairwise(cuts)]
    assert Metrics.merged(parts).to_floats() == pytest.approx(expected(VALUES), rel=1e-12)


def test_the_edges():
    assert observed([]).to_floats() == {}
    assert observed([3.0]).to_floats() == {"std": 0.0, "sample_std": 0.0, "ess": 1.0, "mean": 3.0}
    assert observed([0.0, 0.0]).to_floats()["ess"] == 0.0
    assert observed([1.1] * 9).to_floats()["std"] == pytest.approx(0, abs=1e-7)
    assert math.isnan(observed([1.0, math.nan]).to_floats()["std"])


def test_no_gradient_is_held_of_a_spread():
    metrics, value = Metrics(), torch.ones((), requires_grad=True)
    metrics.add_spread("x", "std", value * 2, value * 4, value)
    held = (metrics["x"].value, metrics["x"].weight, metrics["x"].squares)
    assert not any(torch.as_tensor(part).requires_grad for part in held)


def test_the_bytes_exchanged():
    assert observed(VALUES).reduced_bytes == 3 * 24 + 16


def _reduce_on_rank(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mine = VALUES[:5] if rank == 0 else VALUES[5:]
    reduced = observed(mine).all_reduced(None, torch.device("cpu")).to_floats()
    dist.destroy_process_group()
    assert reduced == pytest.approx(expected(VALUES), rel=1e-12)


def test_two_ranks_add_up_to_the_whole(free_port):
    torch.multiprocessing.spawn(_reduce_on_rank, args=(2, free_port), nprocs=2)
