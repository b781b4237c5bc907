"""Replayed and recorded experts in training, against models whose routers are forced in plain loops."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2MoeConfig

from tandem.engines.train.base import MicroBatching
from tandem.models.double_precision import double_precision
from tandem.models.routing import ROUTED
from tandem.protocol import Ragged
from tests.engines.train import synthetic
from tests.engines.train.models import NO_IDS, UNTIED
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import CUTS, KEPT, make_batch, make_engine
from tests.engines.train.test_routers import CONFIGS as ROUTED_CONFIGS
from tests.support.marks import slow_but

E, K, LAYERS = 4, 2, 2
CONFIGS = {
    **ROUTED_CONFIGS,
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **UNTIED | NO_IDS,
        num_experts=E,
        num_experts_per_tok=K,
        moe_intermediate_size=12,
        num_dense_layers=0,
        layer_types=["conv", "full_attention"],
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replayed")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).double().save_pretrained(folder / name)
    return folder


def routed(batch, seed=1):
    """Return the batch with random experts, which the routers would not choose."""
    draw = torch.Generator().manual_seed(seed)
    tokens = batch.ragged("tokens")
    chosen = torch.rand(len(tokens.values), LAYERS, E, generator=draw).argsort(2)[..., :K]
    return batch.union(type(batch)({ROUTED: Ragged(chosen.to(torch.uint8), tokens.offsets)}))


def forced(model, chosen_TLK, name):
    """Make the routers of a plain model return given experts, with weights of their own scores."""
    hooks = []
    for layer, block in enumerate(model.model.layers):
        mlp = block.feed_forward if name == "lfm2_moe" else block.mlp
        experts = mlp.experts

        def chosen(module, args, layer=layer, mlp=mlp):
            states = args[0]
            router = getattr(mlp, "gate", None) or mlp.router
            logits = torch.nn.functional.linear(states, router.weight, getattr(router, "bias", None))
            picked = chosen_TLK[: len(states), layer].long()
            if name == "gpt_oss":
                weights = logits.gather(1, picked).softmax(1)
            elif name == "qwen3_moe":
                weights = logits.softmax(1).gather(1, picked)
            else:
                weights = logits.sigmoid().gather(1, picked)
                weights = weights / (weights.sum(1, keepdim=True) + (1e-6 if name == "lfm2_moe" else 1e-20))
                weights = weights * (2.5 if name == "deepseek_v3" else 1.0)
            return states, picked, weights

        hooks.append(experts.register_forward_pre_hook(chosen))
    return hooks


def reference(folder, name, batch):
    """Return log-probs of all tokens, and gradients of the synthetic loss, with forced experts."""
    with double_precision():
        model = AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        rows = []
        for ids, chosen_TLK in zip(batch.ragged("tokens"), batch.ragged(ROUTED), strict=True):
            hooks = forced(model, chosen_TLK, name)
            logits = model(ids[None], use_cache=False).logits[0, :-1]
            found = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            rows.append(torch.cat([found.new_zeros(1), found]))
            for hook in hooks:
                hook.remove()
        log_probs = torch.cat(rows)
        mask = batch.ragged("response_mask").values
        (log_probs * mask).sum().backward()
    return log_probs.detach(), {f"model.{n}": p.grad for n, p in model.named_parameters()}


class LogProbSum:
    """The sum of the log-probs of all response tokens."""

    outputs, columns = frozenset({"log_probs"}), frozenset({"response_mask"})

    def __call__(self, out, columns, offsets, counts):
        return (out["log_probs"] * columns["response_mask"]).sum(), synthetic.Metrics()


@pytest.mark.parametrize("name", slow_but(("qwen3_moe", "lfm2_moe"), CONFIGS))
def test_replayed_experts_compute_log_probs_and_gradients(folders, name):
    batch = routed(make_batch())
    log_probs, wanted = reference(folders, name, batch)
    mask = batch.ragged("response_mask").values
    for kept, cut in (("none", "all"), ("full", "one"), ("ops", "tokens")):
        with double_precision():
            engine = make_engine(folders / name, model=KEPT[kept])
            out = engine.forward(batch, outputs=frozenset({"log_probs"}), micro=CUTS[cut])
        found, metrics = synthetic.gradients(engine, batch, LogProbSum(), CUTS[cut])
        torch.testing.assert_close(out.ragged("log_probs").values, log_probs * mask, rtol=1e-9, atol=1e-9)
        found = {n: found[n] for n in found if n in wanted and wanted[n] is not None}
        assert synthetic.relative_difference(found, {n: wanted[n] for n in found}) <= 1e-6, (kept, cut)
        assert 0.2 < metrics["router/differs"] < 0.8


def record(folder, micro=CUTS["three"], batch=None, **options):
    batch = make_batch() if batch is None else batch
    engine = make_engine(folder, **options)
    return engine.forward(batch, outputs=frozenset({ROUTED, "log_probs"}), micro=micro).ragged(ROUTED)


@pytest.mark.parametrize("name", slow_but(("deepseek_v3", "lfm2_moe"), CONFIGS))
def test_recorded_experts_are_those_of_each_sequence_alone(folders, name):
    batch = make_batch()
    found = record(folders / name)
    assert found.dtype == torch.uint8
    for row, chosen_TLK in enumerate(found):
        alone = record(folders / name, MicroBatching(), batch[[row]]).values
        assert torch.equal(chosen_TLK.sort(2).values, alone.sort(2).values)
        assert not chosen_TLK[-1].any() or len(chosen_TLK) == 1


def on_each_rank(folder, options):
    """Return what a rank records, and the log-probs, gradients and metric of a replay."""
    engine = make_engine(folder, **options)
    batch = routed(make_batch())
    if engine.share.size > 1:
        batch = batch[:7] if engine.share.rank == 0 else batch[7:]
    plain = batch.select(["tokens", "response_mask"], ())
    recorded = engine.forward(plain, outputs=frozenset({ROUTED}), micro=CUTS["three"])
    out = engine.forward(batch, outputs=frozenset({"log_probs"}), micro=CUTS["three"])
    found, metrics = synthetic.gradients(engine, batch, LogProbSum(), CUTS["three"])
    return recorded.ragged(ROUTED), out.ragged("log_probs"), found, metrics["router/differs"]


DIVISIONS = {"rows": {}, "tokens": {"sequence_parallel": 2}}


@pytest.mark.parametrize("division", DIVISIONS)
def test_two_ranks_record_and_replay_like_one(folders, division):
    alone = on_each_rank(folders / "qwen3_moe", {})
    both = on_ranks(on_each_rank, folders / "qwen3_moe", DIVISIONS[division])
    for found, whole in zip(zip(*both, strict=True), alone[:2], strict=False):
        joined = Ragged.cat(found) if division == "rows" else found[0]
        torch.testing.assert_close(joined.values, whole.values, rtol=1e-9, atol=1e-9)
    for _, _, gradients, differs in both:
        assert synthetic.relative_difference(gradients, alone[2]) <= 1e-9
        assert differs == pytest.approx(alone[3], rel=1e-12)
