"""Deterministic kernels: where they are in force, what has none, and bit-identical repeated runs."""

import os

import pytest
import torch

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train import deterministic
from tandem.engines.train.deterministic import deterministic_kernels, prepare
from tandem.engines.train.module import Settings, check_options
from tandem.errors import ConfigError, EngineError
from tests.engines.train import synthetic
from tests.engines.train.on_ranks import on_ranks, seven_or_three

EXACT = {"full_determinism": True}
CUDA = torch.device("cuda", 0)


required = torch.are_deterministic_algorithms_enabled


class WatchedLoss(synthetic.SyntheticLoss):
    def __call__(self, out, columns, offsets, counts):
        self.seen = [required()]
        out["log_probs"].register_hook(lambda _: self.seen.append(required()))
        return super().__call__(out, columns, offsets, counts)


class PuttingLoss(synthetic.SyntheticLoss):
    def __call__(self, out, columns, offsets, counts):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        return super().__call__(out, columns, offsets, counts)


@pytest.mark.parametrize("asked", [True, False])
def test_they_hold_for_the_engines_work_alone(folder, asked):
    engine = synthetic.make_engine(folder, fsdp={"full_determinism": asked})
    loss, batch = WatchedLoss(), synthetic.make_batch()
    synthetic.train(engine, batch, loss=loss)
    assert loss.seen == [asked, asked] and not required()
    seen = []
    engine.module.decoder.layers[0].register_forward_hook(lambda *_: seen.append(required()))
    synthetic.output(engine, batch, cut="all")
    synthetic.borrowed_logits(engine)
    assert seen == [asked, False]


def test_what_was_set_before_is_set_again():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert required()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operation_without_a_deterministic_kernel_is_refused(folder):
    engine = synthetic.make_engine(folder, fsdp=EXACT)
    before = synthetic.weights(engine)
    with pytest.raises(EngineError, match="put_") as caught:
        synthetic.train(engine, synthetic.make_batch(), loss=PuttingLoss())
    assert caught.value.field == "fsdp_config.full_determinism"
    with pytest.raises(RuntimeError, match="something else"), deterministic_kernels():
        raise RuntimeError("something else")
    assert synthetic.same(synthetic.weights(engine), before) and not required()
    synthetic.train(synthetic.make_engine(folder), synthetic.make_batch(), loss=PuttingLoss())


def test_it_changes_no_weight(folder):
    engines = [synthetic.make_engine(folder, fsdp={"full_determinism": asked}) for asked in (True, False)]
    for engine in engines:
        synthetic.train(engine, synthetic.make_batch(), steps=2)
    assert synthetic.same(*map(synthetic.weights, engines))


def three_steps(folder):
    engine = synthetic.make_engine(folder, precision="fp32", fsdp=EXACT)
    synthetic.train(engine, seven_or_three(synthetic.make_batch(torch.float32)), steps=3)
    return synthetic.weights(engine)


@pytest.mark.slow
def test_two_runs_on_two_ranks_are_the_same_to_the_bit(folder):
    first, second = (on_ranks(three_steps, folder)[0] for _ in range(2))
    started = synthetic.weights(synthetic.make_engine(folder, precision="fp32"))
    assert synthetic.same(first, second)
    assert synthetic.relative_difference(first, started) > 1e-3


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
    with pytest.raises(ConfigError, match="cuBLAS"):
        prepare(FSDPConfig(**EXACT), CUDA)


def test_ligers_kernels_are_refused_before_anything_is_loaded():
    model = BackboneConfig(path="nowhere", use_liger=True)
    with pytest.raises(ConfigError, match=r"model\.use_liger=false"):
        check_options(Settings(model, FSDPConfig(**EXACT), None, torch.device("cpu")))
