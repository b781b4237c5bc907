"""In a micro-batch the host never waits for a value or a size that only the device knows."""

import dataclasses
import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.algorithms import masked
from tandem.config.critic import CriticConfig, CriticModelConfig
from tandem.engines.train.base import Counts, MicroBatching
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.workers.losses import ActorLoss, CriticLoss, NextTokenLoss
from tests.engines.train import corrected, synthetic

COUNTS = Counts(tokens=50, sequences=8)
WAITS = {
    getattr(torch.ops.aten, name).default
    for name in ("_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero")
}
COMPARED = ("rollout_log_probs", "rollout_log_probs_untruncated")


class NoWaitOperators(TorchDispatchMode):
    """A mode that refuses operators whose result the host would wait for if the device were a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func not in WAITS, func
        if func is torch.ops.aten.repeat_interleave.Tensor:
            assert kwargs.get("output_size") is not None, "a size that only the device knows"
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as index"
        return func(*args, **kwargs)


class NoWaitCalls(TorchFunctionMode):
    """A mode that refuses calls that PyTorch answers on a CPU without an operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (Tensor.tolist, Tensor.numpy, Tensor.cpu), func
        return func(*args, **(kwargs or {}))


@contextmanager
def no_wait():
    with NoWaitOperators(), NoWaitCalls():
        yield


def batch_of(dtype=torch.float32):
    """Return a batch with every column that a loss may read."""
    batch = synthetic.make_batch(dtype)
    for name in (*COMPARED, "values", "returns"):
        batch.batch[name] = batch.batch["old_log_probs"]
    return batch


def actor_loss(mode):
    loss = ActorLoss.from_config(corrected.actor_config(mode), recomputed=True)
    return dataclasses.replace(loss, compared=frozenset(COMPARED))


def critic_loss(mode):
    config = CriticConfig(model=CriticModelConfig(path=""), loss_agg_mode=mode)
    return CriticLoss(config.cliprange_value, config.aggregation, 20.0)


@contextmanager
def cuda_reports_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def clean(engine):
    engine.module.zero_grad(set_to_none=True)
    engine._reshard()


def accumulate(engine, loss, batch, *, cut="three", within=no_wait):
    """Compute gradients within a context that sees waits, and return the metrics."""
    parts = engine._micro_batches(batch, loss.columns, synthetic.CUTS[cut])
    if within is no_wait:  # on a CPU, where the batch already is
        parts = list(parts)
    with within():
        metrics, _ = engine._accumulate(list(parts), loss, COUNTS)
    clean(engine)
    return metrics


QUICK = ("token-mean", "seq-mean-token-mean")
SOME = [pytest.param(mode, marks=[pytest.mark.slow] * (mode not in QUICK)) for mode in synthetic.MODES]


@pytest.mark.parametrize("mode", SOME)
def test_losses_ask_for_nothing(folder, mode, monkeypatch):
    monkeypatch.setattr(masked, "_numpy_can", lambda values: False)  # as on a GPU
    batch = batch_of()
    for kind, loss in (
        ("policy", actor_loss(mode)),
        *(("policy", corrected.loss_of(name, mode)) for name in corrected.ALL),
        ("value", critic_loss(mode)),
        ("policy", NextTokenLoss()),
    ):
        engine = synthetic.make_engine(folder, precision="fp32", kind=kind)
        assert "loss" in accumulate(engine, loss, batch).to_floats()


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("kept", synthetic.KEPT)
def test_layers_ask_for_nothing_however_their_activations_are_kept(folder, kept, precision):
    engine = synthetic.engine_keeping(folder, kept, "copied", precision)
    accumulate(engine, synthetic.SyntheticLoss(), synthetic.batch_of(precision))


VALUES, MASK = torch.arange(4.0), torch.tensor([True, False, True, True])
WAITS_OF_THE_HOST = {
    "item": lambda: VALUES.sum().item(),
    "list": VALUES.tolist,
    "host": VALUES.cpu,
    "places": MASK.nonzero,
    "mask": lambda: VALUES[MASK],
    "truth": lambda: bool(MASK.all()),
    "sizes": lambda: VALUES.repeat_interleave(MASK.long()),
}


@pytest.mark.parametrize("name", WAITS_OF_THE_HOST)
def test_the_watch_sees_a_wait(name):
    with pytest.raises(AssertionError), no_wait():
        WAITS_OF_THE_HOST[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kept", synthetic.KEPT)
@pytest.mark.parametrize("offload", ["async", "sync", None])
def test_cuda_is_never_waited_for(folder, offload, kept, precision):
    """CUDA itself reports a wait between the batch on the host and the gradients."""
    engine = cuda_engine(folder, kept, offload, precision)
    for loss in (synthetic.SyntheticLoss(), *(actor_loss(mode) for mode in synthetic.MODES)):
        accumulate(engine, loss, batch_of(), cut="all", within=nullcontext)  # libraries allocate memory
        torch.cuda.synchronize()
        accumulate(engine, loss, batch_of(), cut="all", within=cuda_reports_waits)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", synthetic.KEPT)
def test_cuda_offload_changes_no_gradient(folder, kept):
    """Copies run on a separate stream, over several micro-batches and steps, in float64."""
    batch, loss, micro = batch_of(torch.float64), synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    plain = cuda_engine(folder, "none", None, "fp64")
    wanted, _ = synthetic.gradients(plain, batch, loss, micro)
    for offload in ("async", "sync"):
        engine = cuda_engine(folder, kept, offload, "fp64")
        for _ in range(5):
            found, metrics = synthetic.gradients(engine, batch, loss, micro)
            assert synthetic.relative_difference(found, wanted) <= 1e-12
        assert metrics["activation_offload_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["none", "full"])
def test_cuda_memory_goes_down_by_what_left(kept, tmp_path):
    """Memory is measured between forward and backward of a model that needs most memory for activations."""
    folder = synthetic.save_model(tmp_path, num_hidden_layers=12, hidden_size=256, intermediate_size=512)
    tokens = Ragged.from_list([torch.randint(0, 31, (1024,))] * 16)
    batch = DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() > 0)})
    held = {}
    for offload in (None, "sync", "async"):
        engine = cuda_engine(folder, kept, offload, "fp32")
        (part,) = engine._micro_batches(batch, frozenset(), MicroBatching())
        gc.collect()  # free the previous engine
        before = torch.cuda.memory_allocated()
        out = engine.module(part.inputs, frozenset({"log_probs"}))["log_probs"]
        torch.cuda.synchronize()
        held[offload] = torch.cuda.memory_allocated() - before
        out.sum().backward()
        if offload is not None:
            metrics = Metrics()
            engine.activation_offload.report(metrics)
            moved = metrics.to_floats()["activation_offload_bytes"]
            assert held[None] - held[offload] == pytest.approx(moved, rel=0.05)
        clean(engine)


def cuda_engine(folder, kept, offload, precision):
    keys = {"enable_activation_offload": True, "activation_offload_mode": offload} if offload else {}
    fsdp = {"model_dtype": "fp64" if precision == "fp64" else "fp32", "dtype": precision}
    engine = synthetic.make_engine(folder, model=synthetic.KEPT[kept] | keys, fsdp=fsdp, device="cuda:0")
    if engine.activation_offload is not None:
        engine.activation_offload.min_bytes = 0
    return engine
