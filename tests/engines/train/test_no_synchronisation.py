"""In a micro-batch the host never waits for the device.

Nothing asks for a value or a size that only the device knows.
"""

import dataclasses
import gc
from contextlib import contextmanager

import activation_job
import corrected
import pytest
import synthetic
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.algorithms import masked
from tandem.config.actor import ActorConfig
from tandem.config.critic import CriticConfig, CriticModelConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import Counts, MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.workers.losses import ActorLoss, CriticLoss, NextTokenLoss

COUNTS = Counts(tokens=50, sequences=8)
WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
}
KEYS = {"use_kl_loss": True, "entropy_coeff": 0.1}


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
    for name, source in {
        "rollout_log_probs": "old_log_probs",
        "rollout_log_probs_untruncated": "ref_log_probs",
        "values": "old_log_probs",
        "returns": "advantages",
    }.items():
        batch.batch[name] = batch.batch[source]
    return batch


def actor_loss(mode):
    loss = ActorLoss.from_config(
        ActorConfig(loss_agg_mode=mode, loss_scale_factor=20.0, **KEYS), recomputed=True
    )
    compared = frozenset({"rollout_log_probs", "rollout_log_probs_untruncated"})
    return dataclasses.replace(loss, compared=compared)


def critic_loss(mode):
    config = CriticConfig(model=CriticModelConfig(path=""), loss_agg_mode=mode)
    return CriticLoss(config.cliprange_value, config.aggregation, 20.0)


def one_micro_batch(engine, loss, batch):
    """Run forward, loss and backward of the whole batch as one micro-batch. The gradients are kept."""
    parts = list(engine._micro_batches(batch, loss.columns, MicroBatching()))
    return engine._accumulate(parts, loss, COUNTS)


def clean(engine):
    engine.module.zero_grad(set_to_none=True)
    engine._reshard()


@pytest.mark.parametrize(
    "mode",
    [
        mode if mode in ("token-mean", "seq-mean-token-mean") else pytest.param(mode, marks=pytest.mark.slow)
        for mode in synthetic.MODES
    ],
)
def test_losses_ask_for_nothing(folder, mode, monkeypatch):
    monkeypatch.setattr(masked, "_numpy_can", lambda values: False)  # as on a GPU
    batch = batch_of()
    for kind, loss in (
        ("policy", actor_loss(mode)),
        *(("policy", corrected.loss_of(name, mode)) for name in (*corrected.SETTINGS, *corrected.BYPASSES)),
        ("value", critic_loss(mode)),
        ("policy", NextTokenLoss()),
    ):
        engine = synthetic.make_engine(folder, precision="fp32", kind=kind)
        parts = list(engine._micro_batches(batch, loss.columns, synthetic.CUTS["three"]))
        with no_wait():
            metrics, _ = engine._accumulate(parts, loss, COUNTS)
        assert {"loss"} <= set(metrics.to_floats())
        clean(engine)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("mode", activation_job.MODES)
def test_layers_ask_for_nothing_however_their_activations_are_kept(folder, mode, precision):
    engine = activation_job.engine_with(folder, mode, "copied", precision)
    loss, batch = synthetic.SyntheticLoss(), activation_job.batch_of(precision)
    parts = list(engine._micro_batches(batch, loss.columns, synthetic.CUTS["three"]))
    with no_wait():
        engine._accumulate(parts, loss, COUNTS)
    clean(engine)


def test_the_watch_sees_a_wait():
    values, mask = torch.arange(4.0), torch.tensor([True, False, True, True])
    waits = {
        "item": lambda: values.sum().item(),
        "list": values.tolist,
        "host": values.cpu,
        "places": mask.nonzero,
        "mask": lambda: values[mask],
        "truth": lambda: bool(mask.all()),
        "sizes": lambda: values.repeat_interleave(mask.long()),
    }
    for name, wait in waits.items():
        seen = False
        try:
            with no_wait():
                wait()
        except AssertionError:
            seen = True
        assert seen, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", activation_job.MODES)
@pytest.mark.parametrize("offload", ["async", "sync", None])
def test_cuda_is_never_waited_for(folder, offload, mode, precision):
    """CUDA itself reports a wait between the batch on the host and the gradients."""
    engine = cuda_engine(folder, activation_job.MODES[mode], offload, precision)
    for loss in (synthetic.SyntheticLoss(), *(actor_loss(mode) for mode in synthetic.MODES)):
        one_micro_batch(engine, loss, batch_of())  # warm up libraries and host memory
        clean(engine)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            one_micro_batch(engine, loss, batch_of())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        clean(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", activation_job.MODES)
def test_cuda_offload_changes_no_gradient(folder, mode):
    """Copies run on a separate stream, over several micro-batches and steps, in float64."""
    batch, loss, micro = batch_of(torch.float64), synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    plain = cuda_engine(folder, activation_job.MODES["none"], None, "fp64")
    wanted, _ = synthetic.gradients(plain, batch, loss, micro)
    for offload in ("async", "sync"):
        engine = cuda_engine(folder, activation_job.MODES[mode], offload, "fp64")
        for _ in range(5):
            found, metrics = synthetic.gradients(engine, batch, loss, micro)
            assert synthetic.relative_difference(found, wanted) <= 1e-12
        assert metrics["activation_offload_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_cuda_memory_goes_down_by_what_left(mode, tmp_path):
    """Memory is measured between forward and backward of a model that needs most memory for activations."""
    folder = synthetic.save_model(tmp_path, num_hidden_layers=12, hidden_size=256, intermediate_size=512)
    tokens = Ragged.from_list([torch.randint(0, 31, (1024,))] * 16)
    batch = DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() > 0)})
    held, said = {}, {}
    for offload in (None, "sync", "async"):
        engine = cuda_engine(folder, activation_job.MODES[mode], offload, "fp32")
        (part,) = engine._micro_batches(batch, frozenset(), MicroBatching())
        gc.collect()  # free the previous engine
        before = torch.cuda.memory_allocated()
        out = engine.module(part.inputs, frozenset({"log_probs"}))["log_probs"]
        torch.cuda.synchronize()
        held[offload] = torch.cuda.memory_allocated() - before
        out.sum().backward()
        metrics = Metrics()
        if engine.activation_offload is not None:
            engine.activation_offload.report(metrics)
        said[offload] = metrics.to_floats()
        clean(engine)
    for offload in ("sync", "async"):
        moved = said[offload]["activation_offload_bytes"]
        assert held[None] - held[offload] == pytest.approx(moved, rel=0.05)


def cuda_engine(folder, keys, offload, precision):
    keys = keys | ({"enable_activation_offload": True, "activation_offload_mode": offload} if offload else {})
    master = "fp64" if precision == "fp64" else "fp32"
    engine = FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder), **keys),
        fsdp=FSDPConfig(model_dtype=master, dtype=precision),
        optim=OptimConfig(lr=1e-3),
        total_steps=10,
        device=torch.device("cuda", 0),
    )
    if engine.activation_offload is not None:
        engine.activation_offload.min_bytes = 0
    return engine
