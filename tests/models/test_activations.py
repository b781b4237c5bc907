"""Checkpointing and offload of a model's layers, compared with the plain layers."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError, EngineError
from tandem.models import linear as linear_module
from tandem.models.activation_offload import ActivationOffload, SameStream
from tandem.models.activations import manage_activations, operators, recomputed_layers
from tandem.models.loading import load_policy
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.observability.metrics import Metrics
from tandem.protocol import Ragged
from tests.models.small import CPU, SHAPE, save

LAYERS, HIDDEN = 5, 32
LENGTHS = [17, 4, 30, 9]
TOKENS = sum(LENGTHS) - len(LENGTHS)  # the last token of a sequence is no input
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
MODES = {
    "none": {"enable_gradient_checkpointing": False},
    "full": {"gradient_checkpointing_mode": "full"},
    "first": {"gradient_checkpointing_mode": "first", "gradient_checkpointing_layers": 2},
    "every": {"gradient_checkpointing_mode": "every", "gradient_checkpointing_layers": 2},
    "ops": {"gradient_checkpointing_mode": "ops"},
    "attention": {"gradient_checkpointing_mode": "ops", "gradient_checkpointing_ops": ("attention",)},
}
AGAIN = {"none": [], "full": range(LAYERS), "first": [0, 1], "every": [1, 3], "ops": range(LAYERS)}
"""The layers that run again in the backward pass."""

OFFLOADS = {
    "none": {},
    "async": {"enable_activation_offload": True},
    "sync": {"enable_activation_offload": True, "activation_offload_mode": "sync"},
}
MATMUL, ATTENTION = set(operators(["matmul"])), set(operators(["attention"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(Qwen2Config(**SHAPE | {"num_hidden_layers": LAYERS}), tmp_path_factory.mktemp("model"))


def policy_of(folder, dtype=torch.float64):
    return PolicyModel(load_policy(folder, dtype=dtype))


def managed(folder, dtype=torch.float64, **keys):
    policy = policy_of(folder, dtype)
    config = BackboneConfig(path=str(folder), **keys)
    return policy, manage_activations(policy.decoder.layers, config, CPU).offload


def inputs(seed=1):
    draw = torch.Generator().manual_seed(seed)
    tokens = Ragged.from_list([torch.randint(0, 31, (n,), generator=draw) for n in LENGTHS])
    return pack(tokens, None, device=CPU)


def loss_of(policy, seed=1):
    out = policy(inputs(seed), frozenset({"log_probs", "entropy"}))
    return (out["log_probs"] * torch.linspace(-1, 1, len(out["log_probs"]))).sum() + out["entropy"].sum()


def gradients(policy, seed=1, loss=loss_of):
    policy.zero_grad()
    loss(policy, seed).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def assert_equal(found, wanted, tolerance=0.0):
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= tolerance * value.norm(), name


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.runs = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[func] += 1
        return func(*args, **(kwargs or {}))

    def of(self, ops):
        return sum(self.runs[op] for op in ops)


def saved_bytes(policy, at_least=0):
    """Return, per layer, the bytes of distinct saved storages; parameters and keywords do not count."""
    found = []

    def run(layer, forward, *args, **given):
        shared = [*layer.parameters(), *given["attention_mask"].tokens.tensors, *given["position_embeddings"]]
        outside = {tensor.untyped_storage().data_ptr() for tensor in (*shared, given["position_ids"])}
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in outside:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = forward(*args, **given)
        found.append(sum(nbytes for nbytes in storages.values() if nbytes >= at_least))
        return out

    for layer in policy.decoder.layers:
        layer.forward = partial(run, layer, layer.forward)
    loss_of(policy)
    return found


@PRECISIONS
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_layers_as_they_are(folder, mode, offload, dtype):
    wanted = gradients(policy_of(folder, dtype))
    policy, _ = managed(folder, dtype, **MODES[mode], **OFFLOADS[offload])
    assert_equal(gradients(policy), wanted, 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("mode", ["full", "ops"])
def test_other_architectures(model_folder, mode):
    wanted = gradients(policy_of(model_folder))
    policy, offload = managed(model_folder, **MODES[mode], **OFFLOADS["async"])
    offload.lane = SameStream()
    assert_equal(gradients(policy), wanted, 1e-12)


@PRECISIONS
def test_operators_that_are_kept_do_not_run_again(folder, dtype):
    found = {}
    for mode in ("none", "full", "ops", "attention"):
        policy, _ = managed(folder, dtype, **MODES[mode])
        with Operators() as seen:
            gradients(policy)
        with torch.no_grad():
            assert torch.equal(loss_of(policy), loss_of(policy_of(folder, dtype)))
        found[mode] = seen.of(MATMUL), seen.of(ATTENTION)
    products, attended = found["none"]
    assert attended == len(inputs().packing.rectangles) * LAYERS > 0 and found["ops"] == found["none"]
    # No one saves a layer's last product: the second run stops before it; through oneDNN, after it.
    again = (7 if linear_module._fast(torch.empty(8, 1, dtype=dtype)) else 6) * LAYERS
    assert found["attention"] == (products + again, attended)
    assert found["full"] == (products + again, 2 * attended)


def test_an_operator_is_named_by_group_or_by_name():
    aten, bmm = torch.ops.aten, set(operators(["aten.bmm"]))
    assert {aten.mm.default, aten.addmm.default} <= MATMUL and aten.bmm.default in bmm
    assert aten.mm.out not in MATMUL  # if kept, the buffer would not be written again
    assert set(operators(["aten.bmm", "matmul"])) == MATMUL | bmm
    for name in ("aten.no_such_operator", "no_such_namespace.mm", "linear"):
        with pytest.raises(ConfigError) as caught:
            operators(["aten.mm", name])
        assert (caught.value.field, caught.value.got) == ("gradient_checkpointing_ops", name)


def test_more_layers_than_there_are(folder):
    assert list(recomputed_layers(6, "every", 3)) == [2, 5] and list(recomputed_layers(3, "every", 3)) == [2]
    for mode in ("first", "every"):
        with pytest.raises(ConfigError) as caught:
            managed(folder, gradient_checkpointing_mode=mode, gradient_checkpointing_layers=LAYERS + 1)
        assert caught.value.expected == f"at most {LAYERS}"


@PRECISIONS
def test_a_layer_that_runs_again_saves_its_input_alone(folder, dtype):
    given = TOKENS * HIDDEN * dtype.itemsize
    (everything,) = set(saved_bytes(policy_of(folder, dtype)))
    assert everything > 12 * given
    for mode, again in AGAIN.items():
        policy, _ = managed(folder, dtype, **MODES[mode])
        wanted = [given if index in again else everything for index in range(LAYERS)]
        assert saved_bytes(policy) == wanted, mode


def offloaded(folder, mode="none", **options):
    policy, _ = managed(folder, **MODES[mode])
    options = {"ahead": 1, "min_bytes": 1} | options
    return policy, ActivationOffload(policy.decoder.layers, CPU, **options)


def reported(offload):
    """Return the bytes that were offloaded and that were on the device."""
    metrics = Metrics()
    offload.report(metrics)
    found = metrics.to_floats()
    assert found.keys() == {"activation_offload_bytes", "activation_resident_bytes"}
    return tuple(found[f"activation_{name}_bytes"] for name in ("offload", "resident"))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("copies", [False, True], ids=["counted", "copied"])
@pytest.mark.parametrize("mode", MODES)
def test_what_leaves_and_what_stays_is_counted(folder, mode, copies, ahead):
    """All layers except the last send their saved tensors. With `ahead`, two layers are on the device."""
    saved = saved_bytes(managed(folder, **MODES[mode])[0])
    policy, offload = offloaded(folder, mode, lane=SameStream() if copies else None, ahead=ahead)
    loss_of(policy).backward()
    before = [0, *saved[:-1]] if ahead else [0] * LAYERS
    resident = max(own + other for own, other in zip(saved, before, strict=True))
    assert reported(offload) == (sum(saved[:-1]), resident) and reported(offload) == (0, 0)


def test_small_storages_stay(folder):
    limit = TOKENS * 8 + 1
    (everything,), (large,) = (set(saved_bytes(policy_of(folder), least)) for least in (0, limit))
    assert everything - large >= 2 * TOKENS * 4
    policy, offload = offloaded(folder, lane=SameStream(), min_bytes=limit)
    assert_equal(gradients(policy), gradients(policy_of(folder)))
    assert reported(offload) == ((LAYERS - 1) * large, 2 * large + LAYERS * (everything - large))


class LateLane:
    """A lane that copies only when waited for, so that memory read or freed too early is noticed."""

    def __init__(self):
        self.queue, self.done = [], 0
        self.out, self.back = [], []  # weak references to the device's storages, of copies there and back
        self.alive = []  # which of these still existed at the start of each copy

    def start(self, pairs):
        leaves = len(self.out) < LAYERS - 1
        devices = [StorageWeakRef(pair[1 if leaves else 0].untyped_storage()) for pair in pairs]
        (self.out if leaves else self.back).append(devices)
        self.alive.append((_alive(self.out), _alive(self.back)))
        self.queue.append([(Weak(target), Weak(source)) for target, source in pairs])
        return len(self.queue)

    def wait(self, mark):
        for pairs in self.queue[self.done : mark]:
            for target, source in pairs:
                target.tensor().copy_(source.tensor())
        self.done = max(self.done, mark)


class Weak:
    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.start, self.size = tensor.storage_offset(), len(tensor)

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "freed before its copy ended"
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.start, (self.size,))


def _alive(groups):
    return [index for index, group in enumerate(groups) if not all(ref.expired() for ref in group)]


@pytest.mark.parametrize("mode", MODES)
def test_copies_may_end_as_late_as_they_are_waited_for(folder, mode):
    """A layer's tensors stay on the device only while its neighbour computes, except the embeddings."""
    lane = LateLane()
    policy, offload = offloaded(folder, mode, lane=lane)
    assert_equal(gradients(policy), gradients(policy_of(folder)))
    near = [{max(index - 1, 0), index} for index in range(LAYERS - 1)]
    held = {0} if mode not in ("none", "every") else set()
    forward, backward = [(sorted(each | held), []) for each in near], [([], sorted(each)) for each in near]
    assert lane.alive == forward + backward
    assert lane.done == len(lane.queue) == 2 * (LAYERS - 1)
    offload.report(Metrics())
    assert _alive(lane.back) == []


def test_host_memory_is_used_again_and_grows(folder):
    policy, offload = offloaded(folder, lane=SameStream())
    places = []
    for _ in range(3):
        gradients(policy)
        offload.report(Metrics())
        places.append({index: memory.data_ptr() for index, memory in offload._memory.items()})
    assert places == places[:1] * 3 and list(places[0]) == list(range(LAYERS - 1))
    before = {index: len(memory) for index, memory in offload._memory.items()}

    def longer(policy, seed):
        given = pack(Ragged.from_list([torch.arange(20)] * 8), None, device=CPU)
        return policy(given, frozenset({"log_probs"}))["log_probs"].sum()

    assert_equal(gradients(policy, loss=longer), gradients(policy_of(folder), loss=longer))
    assert all(len(memory) > before[index] for index, memory in offload._memory.items())


def test_micro_batches_follow_each_other(folder):
    """Every forward and backward is independent, also after a forward that raised an error."""
    plain = policy_of(folder)
    policy, offload = offloaded(folder, lane=LateLane())
    assert_equal(gradients(policy, seed=1), gradients(plain, seed=1))
    offload.report(Metrics())
    broken = policy.decoder.layers[3].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(policy, seed=2)
    broken.remove()
    offload.lane.out.clear()
    assert_equal(gradients(policy, seed=3), gradients(plain, seed=3))
    with torch.no_grad():
        assert torch.equal(loss_of(policy), loss_of(plain))


def test_a_backward_that_comes_too_late_is_refused(folder):
    policy, offload = offloaded(folder, lane=SameStream())
    for end in (lambda: loss_of(policy, seed=2).backward(), lambda: offload.report(Metrics())):
        late = loss_of(policy)
        end()
        with pytest.raises(EngineError, match="already freed"):
            late.backward()
