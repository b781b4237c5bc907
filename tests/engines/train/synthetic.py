"""A tiny model, a batch, losses, an engine, and what a test asks of it."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from tandem.algorithms.aggregation import aggregate
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.models.activation_offload import SameStream
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
CUTS = {
    "all": MicroBatching(),
    "one": MicroBatching(max_samples=1),
    "three": MicroBatching(max_samples=3),
    "tokens": MicroBatching(max_tokens=40),
}
LENGTHS = [5, 17, 30, 12, 12, 2, 9, 1, 23, 12]
KEPT = {  # ways to keep activations
    "none": {"enable_gradient_checkpointing": False},
    "full": {"gradient_checkpointing_mode": "full"},
    "first": {"gradient_checkpointing_mode": "first", "gradient_checkpointing_layers": 1},
    "every": {"gradient_checkpointing_mode": "every", "gradient_checkpointing_layers": 2},
    "ops": {"gradient_checkpointing_mode": "ops"},
}
OFFLOADS = {"none": {}, "copied": {"enable_activation_offload": True}}
SHAPE = {
    **{"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    },
}


def save_model(folder, **shape):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**{**SHAPE, **shape})).save_pretrained(folder)
    return folder


def save_scorer(folder):
    torch.manual_seed(1)
    config = Qwen2Config(**SHAPE, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def make_batch(dtype=torch.float64, seed=0):
    """Return ten sequences of unequal length with holes in their masks. One of them has no response."""
    draw = torch.Generator().manual_seed(seed)
    tokens = Ragged.from_list([torch.randint(0, 31, (n,), generator=draw) for n in LENGTHS])
    total = len(tokens.values)
    mask = (tokens.positions() >= 2) & (torch.rand(total, generator=draw) < 0.8)
    mask[tokens.offsets[4] : tokens.offsets[5]] = False
    advantages, *noise = torch.randn(3, total, generator=draw, dtype=torch.float64).to(dtype)
    old, ref = (-3 + 0.3 * each for each in noise)
    columns = {"response_mask": mask, "advantages": advantages, "old_log_probs": old, "ref_log_probs": ref}
    return DataProto({"tokens": tokens} | {name: tokens.with_values(each) for name, each in columns.items()})


def batch_of(precision, seed=0):
    return make_batch(torch.float64 if precision == "fp64" else torch.float32, seed)


@dataclass
class SyntheticLoss:
    """A loss like that of a policy update: a clipped ratio, an entropy bonus and a k3 KL term."""

    mode: str = "token-mean"
    scale: float = 1.0
    outputs: frozenset = frozenset({"log_probs", "entropy"})
    columns: frozenset = frozenset({"response_mask", "advantages", "old_log_probs", "ref_log_probs"})

    def __call__(self, out, columns, offsets, counts):
        mask = columns["response_mask"]
        ratio = ((out["log_probs"] - columns["old_log_probs"]) * mask).exp()
        surrogate = -torch.min(ratio * columns["advantages"], ratio.clamp(0.8, 1.2) * columns["advantages"])
        gap = (columns["ref_log_probs"] - out["log_probs"]) * mask
        values = surrogate - 0.05 * out["entropy"] + 0.1 * (gap.exp() - gap - 1)
        counted = {"tokens": counts.tokens, "sequences": counts.sequences, "norm_length": 20}
        loss = aggregate(values * self.scale, mask, offsets, mode=self.mode, **counted)
        metrics = Metrics()
        metrics.add_sum("loss", loss)
        metrics.add_mean("entropy", (out["entropy"] * mask).sum(), mask.sum())
        metrics.add_max("tokens", counts.tokens)
        metrics.add_max("sequences", counts.sequences)
        return loss, metrics


@dataclass
class ValueLoss:
    outputs: frozenset = frozenset({"values"})
    columns: frozenset = frozenset({"response_mask", "advantages"})

    def __call__(self, out, columns, offsets, counts):
        error = (out["values"] - columns["advantages"]).square() * columns["response_mask"]
        return error.sum() / counts.tokens, Metrics()


def load_plain(folder, attention="eager"):
    """Return transformers' own model in float64. Eager attention is exact only within `double_precision`."""
    plain = {"attn_implementation": attention, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)


def reference(model, batch, mode="token-mean"):
    """Compute the loss of `SyntheticLoss` with transformers' own model, one sequence at a time.

    Returns the gradients by name, the loss, and the log-probs of each sequence's tokens after the first.
    """
    loss, log_probs = torch.zeros((), dtype=torch.float64), []
    mask = batch.ragged("response_mask")
    answers = [int(row.sum()) for row in mask]
    tokens, sequences = sum(answers), sum(count > 0 for count in answers)
    for i, ids in enumerate(batch.ragged("tokens")):
        log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        picked = log_p.gather(1, ids[1:, None])[:, 0]
        log_probs.append(picked.detach())
        names = ("advantages", "old_log_probs", "ref_log_probs")
        advantage, old, ref = (batch.ragged(name).row(i)[1:] for name in names)
        ratio, gap = (picked - old).exp(), ref - picked
        values = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        values = values + 0.05 * (log_p.exp() * log_p).sum(-1) + 0.1 * (gap.exp() - gap - 1)
        total = (values * mask.row(i)[1:]).sum()
        divisors = {
            "token-mean": tokens,
            "token-sum": 1,
            "seq-mean-token-sum": sequences,
            "seq-mean-token-sum-norm": sequences * 20,
            "seq-mean-token-mean": max(1, answers[i]) * sequences,
        }
        loss = loss + total / divisors[mode]
    loss.backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters()}, float(loss.detach()), log_probs


def make_engine(
    folder, *, precision="fp64", model=None, fsdp=None, optim=None, frozen=False, device="cpu", **options
):
    return FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder), **(model or {})),
        fsdp=FSDPConfig(**{"model_dtype": precision, "dtype": precision, **(fsdp or {})}),
        optim=None if frozen else OptimConfig(**{"lr": 1e-2, **(optim or {})}),
        total_steps=10,
        device=torch.device(device),
        **options,
    )


def copied(engine):
    """Let saved activations really be copied, within host memory, and return the engine."""
    if engine.activation_offload is not None:
        engine.activation_offload.lane = SameStream()
        engine.activation_offload.min_bytes = 0
    return engine


def engine_keeping(folder, kept, offload="none", precision="fp64", **options):
    """Return an engine that keeps activations in one of the ways `KEPT` and `OFFLOADS`."""
    model = KEPT[kept] | OFFLOADS[offload]
    return copied(make_engine(folder, precision=precision, model=model, **options))


def gradients(engine, batch, loss, micro):
    """Return the whole gradients by name and the metrics of a step. The weights do not change."""
    taken = {}

    def take(lr, grad_norm, clip_grad):
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                taken[name] = parameter.grad.full_tensor().clone()

    engine._state.step, kept = take, engine._state.step
    try:
        metrics = engine.train_step(batch, loss, micro=micro)
    finally:
        engine._state.step = kept
    return taken, metrics.to_floats()


def relative_difference(first, second):
    """Return the relative difference of two sets of tensors, each taken as one vector."""
    assert set(first) == set(second)
    gap = sum(float((first[name] - second[name]).detach().double().square().sum()) for name in first)
    size = sum(float(second[name].detach().double().square().sum()) for name in second)
    return (gap / size) ** 0.5


def same(found, wanted):
    """Return whether two sets of tensors have the same names and values, bit for bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def train(engine, batch, steps=1, loss=None, cut="three"):
    loss = loss or SyntheticLoss()
    return [engine.train_step(batch, loss, micro=CUTS[cut]).to_floats() for _ in range(steps)]


def output(engine, batch, name="log_probs", cut="three", **options):
    found = engine.forward(batch, outputs=frozenset({name}), micro=CUTS[cut], **options)
    return found.ragged(name)


def borrowed_logits(engine):
    """Return the logits of nine tokens by a rollout that borrows the module."""
    with engine.unsharded() as module, torch.no_grad():
        module.set_attn_implementation("sdpa")
        logits = module(torch.arange(9)[None], use_cache=False).logits
        module.set_attn_implementation("tandem_packed")
    return logits


def weights(engine):
    return {name: value.detach().clone() for name, value in engine.weights()}


def units(engine):
    """Return the parameters of the FSDP units: each layer, and the root's own."""
    layers = {f"layer {i}": list(layer.parameters()) for i, layer in enumerate(engine.module.decoder.layers)}
    inside = {id(p) for part in layers.values() for p in part}
    return layers | {"root": [p for p in engine.module.parameters() if id(p) not in inside]}


def shard_numbers(parameters, ranks=2):
    """Count the numbers in one rank's padded shards: the rows of each parameter are divided, rounded up."""
    return sum(-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in parameters)
