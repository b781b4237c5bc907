import math

import pytest
import torch
import torch.distributed as dist

from tandem.observability.metrics import Metric, Metrics


def _random_parts(count: int) -> list[tuple[Metrics, list[float], list[float]]]:
    """Return metrics of random observations, with the observations and weights."""
    parts = []
    for _ in range(count):
        values = torch.randn(5, dtype=torch.float64)
        weights = torch.rand(5, dtype=torch.float64)
        metrics = Metrics()
        for value, weight in zip(values, weights, strict=True):
            metrics.add_sum("sum", value)
            metrics.add_mean("mean", value * weight, weight)
            metrics.add_max("max", value)
            metrics.add_min("min", float(value))
        parts.append((metrics, values.tolist(), weights.tolist()))
    return parts


def test_merging_parts_equals_reducing_all_observations():
    parts = _random_parts(4)
    values = [v for _, part, _ in parts for v in part]
    weights = [w for _, _, part in parts for w in part]
    merged = Metrics.merged(metrics for metrics, _, _ in parts).to_floats()
    assert merged == pytest.approx(
        {
            "sum": math.fsum(values),
            "mean": math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights),
            "max": max(values),
            "min": min(values),
        },
        rel=1e-12,
    )


def test_parts_with_different_names_are_united():
    first, second = Metrics(), Metrics()
    first.add_sum("only/first", 2.0)
    second.add_mean("only/second", 6.0, 4.0)
    assert Metrics.merged([first, second]).to_floats() == {"only/first": 2.0, "only/second": 1.5}


def test_a_maximum_of_python_floats_keeps_double_precision():
    metrics = Metrics()
    metrics.add_max("x", 0.1)
    metrics.add_max("x", torch.tensor(-1.0))
    assert metrics.to_floats()["x"] == 0.1


@pytest.mark.parametrize("add", ["add_max", "add_min", "add_sum"])
def test_nan_is_not_lost_in_a_reduction(add):
    for order in ((math.nan, 1.0), (1.0, math.nan)):
        metrics = Metrics()
        for value in order:
            getattr(metrics, add)("x", value)
        assert math.isnan(metrics.to_floats()["x"])


def test_a_mean_of_nothing_is_left_out():
    metrics = Metrics()
    metrics.add_mean("empty", torch.tensor(0.0), torch.tensor(0.0))
    metrics.add_mean("one", torch.tensor(3.0), 2)
    assert metrics.to_floats() == {"one": 1.5}


def test_one_name_has_one_reduction():
    metrics = Metrics()
    metrics.add_sum("x", 1.0)
    with pytest.raises(AssertionError):
        metrics.add_max("x", 1.0)


def test_no_gradient_is_held():
    metrics = Metrics()
    metrics.add_mean("x", torch.ones((), requires_grad=True) * 2, torch.ones((), requires_grad=True))
    metric = metrics["x"]
    assert isinstance(metric.value, torch.Tensor)
    assert not metric.value.requires_grad
    assert not torch.as_tensor(metric.weight).requires_grad


def _reduce_on_rank(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    metrics = Metrics()
    metrics.add_sum("tokens", 10.0 + rank)
    metrics.add_mean(
        "loss", torch.tensor(3.0 * rank), torch.tensor(float(rank))
    )  # rank 0 has no observations
    metrics.add_max("longest", torch.tensor(5 - rank))
    metrics.add_min("shortest", float(rank))
    reduced = metrics.all_reduced(None, torch.device("cpu")).to_floats()
    dist.destroy_process_group()
    assert reduced == {"tokens": 21.0, "loss": 3.0, "longest": 5.0, "shortest": 0.0}


def test_reduction_over_two_ranks(free_port):
    torch.multiprocessing.spawn(_reduce_on_rank, args=(2, free_port), nprocs=2)


def test_merge_of_two_means_adds_weights():
    merged = Metric(2.0, 1.0, "mean").merge(Metric(4.0, 3.0, "mean"))
    assert (merged.value, merged.weight) == (6.0, 4.0)
