"""Deterministic kernels: where they are in force, what has none, and bit-identical repeated runs."""

import os

import pytest
import repeat_job
import synthetic
import torch

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train import deterministic
from tandem.engines.train.deterministic import deterministic_kernels, prepare
from tandem.engines.train.module import Settings, check_options
from tandem.errors import ConfigError, EngineError
from tandem.protocol import DataProto
from tests.support.ranks import run_ranks

EXACT = {"full_determinism": True}
MICRO = synthetic.CUTS["three"]
CUDA = torch.device("cuda", 0)


class WatchedLoss(synthetic.SyntheticLoss):
    """A loss that notes whether deterministic kernels are required, in the loss and in the backward pass."""

    def __call__(self, out, columns, offsets, counts):
        self.seen = [torch.are_deterministic_algorithms_enabled()]
        out["log_probs"].register_hook(
            lambda grad: self.seen.append(torch.are_deterministic_algorithms_enabled())
        )
        return super().__call__(out, columns, offsets, counts)


class PuttingLoss(synthetic.SyntheticLoss):
    """A loss that uses an operation without a deterministic kernel."""

    def __call__(self, out, columns, offsets, counts):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        return super().__call__(out, columns, offsets, counts)


@pytest.mark.parametrize("asked", [True, False])
def test_they_hold_for_the_engines_work_alone(folder, asked):
    engine = synthetic.make_engine(folder, fsdp={"full_determinism": asked})
    loss, batch = WatchedLoss(), synthetic.make_batch()
    engine.train_step(batch, loss, micro=MICRO)
    assert loss.seen == [asked, asked]
    assert not torch.are_deterministic_algorithms_enabled()
    seen = []
    layer = engine.module.decoder.layers[0]
    layer.register_forward_hook(lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    tokens = DataProto({"tokens": batch.ragged("tokens")})
    engine.forward(tokens, outputs=frozenset({"log_probs"}), micro=synthetic.CUTS["all"])
    with engine.unsharded() as module:
        module.set_attn_implementation("sdpa")
        module(torch.arange(9)[None], use_cache=False)
    assert seen == [asked, False]


def test_what_was_set_before_is_set_again():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operation_without_a_deterministic_kernel_is_refused(folder):
    engine = synthetic.make_engine(folder, fsdp=EXACT)
    before = synthetic.weights(engine)
    with pytest.raises(EngineError, match="no deterministic kernel") as caught:
        engine.train_step(synthetic.make_batch(), PuttingLoss(), micro=MICRO)
    assert caught.value.field == "fsdp_config.full_determinism" and "put_" in caught.value.got
    assert "full_determinism=false" in caught.value.remedy
    after = synthetic.weights(engine)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not torch.are_deterministic_algorithms_enabled()
    synthetic.make_engine(folder).train_step(synthetic.make_batch(), PuttingLoss(), micro=MICRO)


def test_another_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="something else"), deterministic_kernels():
        raise RuntimeError("something else")


def test_it_changes_no_weight(folder):
    steps = {}
    for asked in (True, False):
        engine = synthetic.make_engine(folder, fsdp={"full_determinism": asked})
        for _ in range(2):
            engine.train_step(synthetic.make_batch(), synthetic.SyntheticLoss(), micro=MICRO)
        steps[asked] = synthetic.weights(engine)
    assert all(torch.equal(value, steps[False][name]) for name, value in steps[True].items())


@pytest.mark.slow
def test_two_runs_on_two_ranks_are_the_same_to_the_bit(folder, tmp_path):
    runs = []
    for name in ("first.pt", "second.pt"):
        results = tmp_path / name
        run_ranks(repeat_job.__file__, folder, results)
        runs.append(torch.load(results))
    first, second = runs
    started = synthetic.weights(synthetic.make_engine(folder, precision="fp32"))
    assert first.keys() == second.keys() == started.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert synthetic.relative_difference(first, started) > 1e-3


# Environment variables that CUDA's libraries read. These tests need no device.


@pytest.fixture
def environment(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    used = {"allocation.all.allocated": 0}
    monkeypatch.setattr(deterministic.torch.cuda, "memory_stats", lambda device: used)
    return monkeypatch, used


def read():
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_ALGO")


def test_cuda_libraries_are_told_before_their_first_use(environment):
    patch, used = environment
    prepare(FSDPConfig(), CUDA)
    prepare(FSDPConfig(**EXACT), torch.device("cpu"))
    assert read() == (None, None)
    prepare(FSDPConfig(**EXACT), CUDA)
    assert read() == (":4096:8", "Ring")
    used["allocation.all.allocated"] = 7
    prepare(FSDPConfig(**EXACT), CUDA)  # a second model in the process
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    patch.setenv("NCCL_ALGO", "Tree")
    prepare(FSDPConfig(**EXACT), CUDA)
    assert read() == (":16:8", "Tree")


@pytest.mark.parametrize(("given", "allocated"), [(None, 7), (":0:0", 0)])
def test_too_late_or_another_workspace_is_refused(environment, given, allocated):
    patch, used = environment
    used["allocation.all.allocated"] = allocated
    if given is not None:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    with pytest.raises(ConfigError, match="cuBLAS") as caught:
        prepare(FSDPConfig(**EXACT), CUDA)
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in caught.value.remedy


def test_ligers_kernels_are_refused_before_anything_is_loaded():
    model = BackboneConfig(path="nowhere", use_liger=True)
    with pytest.raises(ConfigError, match="Liger's kernels do not guarantee") as caught:
        check_options(Settings(model, FSDPConfig(**EXACT), None, torch.device("cpu")))
    assert caught.value.remedy == "set model.use_liger=false, or fsdp_config.full_determinism=false"
