"""The engine at world size 1."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.errors import CheckpointError, DataError, EngineError, NonFiniteError
from tandem.protocol import DataProto
from tests.engines.train import synthetic
from tests.engines.train.synthetic import (
    CUTS,
    SyntheticLoss,
    load_plain,
    make_batch,
    make_engine,
    output,
    reference,
    train,
    weights,
)


@pytest.fixture(scope="module")
def engine(folder):
    """Return an engine for tests that do not change the weights."""
    return make_engine(folder)


@pytest.mark.parametrize("mode", synthetic.MODES)
def test_gradient_equals_a_plain_loop_however_it_is_cut(folder, engine, mode):
    batch = make_batch()
    wanted, loss, _ = reference(load_plain(folder, "sdpa"), batch, mode)
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    for cut, micro in CUTS.items():
        found, metrics = synthetic.gradients(engine, batch, SyntheticLoss(mode), micro)
        assert synthetic.relative_difference(found, wanted) <= 1e-9, cut
        assert metrics["loss"] == pytest.approx(loss, rel=1e-9)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert metrics["tokens"] == int(batch.ragged("response_mask").values.sum())
        assert metrics["sequences"] == sum(bool(row.any()) for row in batch.ragged("response_mask"))


KEPT, PADDED = {"enable_gradient_checkpointing": False}, {"use_remove_padding": False}
GATHERED = {"forward_prefetch": True, "reshard_after_forward": False}


@pytest.mark.parametrize(
    "keys",
    [*({"model": m} for m in (KEPT, PADDED, KEPT | PADDED)), {"fsdp": GATHERED}, {"precision": "fp32"}],
)
def test_how_it_is_run_changes_nothing(folder, engine, keys):
    other, batch = make_engine(folder, **keys), synthetic.batch_of(keys.get("precision", "fp64"))
    for cut in ("three", "tokens"):
        first, _ = synthetic.gradients(engine, make_batch(), SyntheticLoss(), CUTS[cut])
        second, _ = synthetic.gradients(other, batch, SyntheticLoss(), CUTS[cut])
        assert synthetic.relative_difference(second, first) <= (1e-5 if "precision" in keys else 1e-12)


def test_bf16_computes_in_bf16_over_fp32_weights(folder):
    half = make_engine(folder, fsdp={"model_dtype": "fp32", "dtype": "bf16"})
    batch = make_batch(torch.float32)
    wanted, _ = synthetic.gradients(make_engine(folder), make_batch(), SyntheticLoss(), CUTS["three"])
    found, _ = synthetic.gradients(half, batch, SyntheticLoss(), CUTS["three"])
    assert 1e-4 < synthetic.relative_difference(found, wanted) < 0.25
    assert all(value.dtype == torch.float32 for _, value in half.weights())
    with half.unsharded() as module:
        assert module.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert output(half, batch).dtype == torch.float32


def test_forward_restores_the_order_and_leaves_other_tokens_zero(engine):
    batch = make_batch()
    mask = batch.ragged("response_mask").values
    for name in ("log_probs", "entropy"):
        values = output(engine, batch, name, "all").values
        assert bool((values[~mask] == 0).all()) and bool((values[mask] != 0).all())
        for cut in ("one", "three", "tokens"):
            part = output(engine, batch, name, cut)
            assert torch.allclose(part.values, values, atol=1e-12, rtol=0)
            assert torch.equal(part.offsets, batch.ragged("tokens").offsets)


def test_reads_after_a_step_are_fresh(folder):
    """A forward leaves FSDP's root gathered, but reads after an update must see the new weights."""
    engine, batch = make_engine(folder), make_batch()

    def read():
        values = output(engine, batch).values
        with engine.unsharded() as module:
            return values, module.get_input_embeddings().weight.detach().clone()

    before, old = read()
    train(engine, batch)
    after, seen = read()
    assert not torch.equal(before, after) and not torch.equal(old, seen)
    assert torch.equal(seen, dict(engine.weights())["model.embed_tokens.weight"])
    ids = batch.ragged("tokens").row(2)
    with engine.unsharded() as module:
        module.set_attn_implementation("sdpa")
        direct = torch.log_softmax(module(ids[None], use_cache=False).logits[0, :-1], -1)
        module.set_attn_implementation("tandem_packed")
    row = batch.ragged("tokens").with_values(after).row(2)[1:]
    wanted = direct.gather(1, ids[1:, None])[:, 0] * batch.ragged("response_mask").row(2)[1:]
    assert torch.allclose(row, wanted, atol=1e-12)
    train(engine, batch)


def test_update_is_clipped_adamw_at_the_scheduled_rate(folder):
    optim = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "clip_grad": 0.05, "lr_warmup_steps": 2}
    engine, batch = make_engine(folder, optim=optim), make_batch()
    reference = {name: torch.nn.Parameter(value) for name, value in weights(engine).items()}
    decayed, spared = ([p for p in reference.values() if p.ndim == n] for n in (2, 1))  # norms and biases: 1
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-8)
    for lr in (0.0, 0.005, 0.01, 0.01):
        found, metrics = synthetic.gradients(engine, batch, SyntheticLoss(), CUTS["three"])
        engine.version -= 1
        assert metrics["grad_norm"] > 0.05
        for name, parameter in reference.items():
            parameter.grad = found[f"model.{name}"] * (0.05 / (metrics["grad_norm"] + 1e-6))
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        (metrics,) = train(engine, batch)
        assert metrics["lr"] == lr
        assert synthetic.relative_difference(weights(engine), reference) <= 1e-10
    assert engine.version == 4


def test_a_short_gradient_is_left_alone(folder):
    batch = make_batch()
    wide, wider = (make_engine(folder, optim={"clip_grad": limit}) for limit in (1e3, 1e6))
    for engine in (wide, wider):
        train(engine, batch)
    assert synthetic.same(weights(wide), weights(wider))


@pytest.mark.parametrize(
    ("scale", "field"), [(math.nan, "loss"), (math.inf, "loss"), (1e306, "gradient norm")]
)
def test_non_finite_changes_nothing(folder, scale, field):
    engine, straight, batch = make_engine(folder), make_engine(folder), make_batch()
    train(engine, batch)
    before = weights(engine)
    with pytest.raises(NonFiniteError) as caught:
        train(engine, batch, loss=SyntheticLoss(scale=scale))
    assert caught.value.field == field and engine.version == 1
    assert synthetic.same(weights(engine), before)
    train(engine, batch)
    train(straight, batch, steps=2)
    assert synthetic.same(weights(engine), weights(straight))


def test_a_step_broken_off_is_not_built_upon(folder):
    engine, batch = make_engine(folder), make_batch()
    before = weights(engine)

    class Interrupted(SyntheticLoss):
        calls = 0

        def __call__(self, *args):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().__call__(*args)

    with pytest.raises(KeyboardInterrupt):
        train(engine, batch, loss=Interrupted(), cut="one")
    assert synthetic.same(weights(engine), before)
    with pytest.raises(EngineError, match="interrupted"):
        train(engine, batch)


def test_a_batch_that_does_not_serve(engine):
    batch = make_batch()
    nothing = torch.zeros_like(batch.ragged("response_mask").values)
    empty = DataProto({**batch.batch, "response_mask": batch.ragged("tokens").with_values(nothing)})
    with pytest.raises(DataError, match="no response token"):
        train(engine, empty)
    batch.pop(["advantages"])
    with pytest.raises(DataError, match="advantages"):
        train(engine, batch)


def test_load_of_what_does_not_fit(folder, engine, tmp_path):
    with pytest.raises(CheckpointError, match="no training state"):
        engine.load(tmp_path)
    engine.save(tmp_path / "policy")
    critic = make_engine(folder, kind="value")
    with pytest.raises(CheckpointError, match="value_head"):
        critic.load(tmp_path / "policy")
    shard = next((tmp_path / "policy").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        make_engine(folder).load(tmp_path / "policy")


def test_value_engine_learns_its_targets(folder):
    critic, batch = make_engine(folder, kind="value", optim={"lr": 1e-2}), make_batch()
    train(critic, batch, steps=15, loss=synthetic.ValueLoss(), cut="tokens")
    mask = batch.ragged("response_mask").values
    values = output(critic, batch, "values").values
    errors = (values - batch.ragged("advantages").values)[mask].square().mean()
    assert errors < 0.5 * batch.ragged("advantages").values[mask].square().mean()


def test_frozen_engine(folder):
    reference = make_engine(folder, frozen=True)
    with pytest.raises(EngineError, match="frozen"):
        train(reference, make_batch())
    info = reference.state_info()
    assert "optimizer@cpu" not in info and info["parameters@cpu"] == 8 * info["parameters"]


def test_offload_on_a_cpu_moves_nothing(folder):
    engine, batch = make_engine(folder, fsdp={"param_offload": True, "optimizer_offload": True}), make_batch()
    assert engine.state_info()["offload_applies"] is False
    engine.offload()
    engine.onload(optimizer=True)
    train(engine, batch)
    plain = make_engine(folder)
    train(plain, batch)
    assert synthetic.same(weights(engine), weights(plain))


def test_temperature_divides_the_logits(folder):
    batch = make_batch()
    warm = make_engine(folder, temperature=2.0, frozen=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    got, ids = output(warm, batch.select(["tokens"], ())), batch.ragged("tokens").row(1)
    log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / 2.0, -1)
    assert torch.allclose(got.row(1)[1:], log_p.gather(1, ids[1:, None])[:, 0], atol=1e-12)


def test_weights_of_another_engine_replace_ones_own(folder):
    source, target, batch = make_engine(folder), make_engine(folder, frozen=True), make_batch()
    train(source, batch)
    before = output(target, batch).values
    target.load_weights(weights(source).items(), 5)
    assert target.version == 5
    found = output(target, batch).values
    assert torch.equal(found, output(source, batch).values) and not torch.equal(found, before)
    with target.unsharded() as module:  # what a rollout would sample from
        embedding = module.get_input_embeddings().weight.detach().clone()
    assert torch.equal(embedding, weights(source)["model.embed_tokens.weight"])


def test_weights_that_do_not_fit_are_named(folder):
    engine = make_engine(folder, frozen=True)
    own, name = weights(engine), "model.norm.weight"
    norm = own.pop(name)
    for given, field, word in (
        ([], name, "missing"),
        ([(name, norm), ("lm_head.weight", norm)], "lm_head.weight", "unknown"),
        ([(name, norm), (name, norm)], name, "unknown"),
        ([(name, norm[1:])], name, "shape"),
    ):
        with pytest.raises(EngineError, match=word) as caught:
            engine.load_weights([*own.items(), *given], 1)
        assert caught.value.field == field
    assert (caught.value.got, caught.value.expected) == ((31,), (32,))
    assert engine.version == 0


def test_one_rank_has_no_collectives(folder):
    engine = make_engine(folder)
    train(engine, make_batch())
    with engine.unsharded():
        pass
    weights(engine)
    assert engine.take_collectives() == (0.0, 0)


@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("remove_padding", [True, False])
def test_scores_are_transformers_own(scorer_folder, cut, remove_padding):
    keys, batch = {"use_remove_padding": remove_padding}, make_batch()
    engine = make_engine(scorer_folder, kind="score", frozen=True, model=keys)
    scores = output(engine, batch, "scores", cut)
    model = AutoModelForSequenceClassification.from_pretrained(
        scorer_folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    wanted = torch.stack([model(ids[None]).logits[0, 0] for ids in batch.ragged("tokens")])
    last = scores.offsets[1:] - 1
    assert scores.dtype == torch.float64
    assert torch.allclose(scores.values[last], wanted, atol=1e-12, rtol=0) and wanted.std() > 0.1
    scores.values[last] = 0
    assert scores.values.abs().max() == 0


@pytest.mark.parametrize(
    ("kind", "name"), [("policy", "log_probs"), ("value", "values"), ("score", "scores")]
)
def test_an_empty_share_has_the_type_of_a_full_one(folder, scorer_folder, kind, name):
    engine = make_engine(scorer_folder if kind == "score" else folder, kind=kind, frozen=True)
    full, empty = (output(engine, batch, name) for batch in (make_batch(), make_batch()[:0]))
    assert (len(empty), len(empty.values), empty.dtype) == (0, 0, full.dtype)
