"""The engine at world size 1."""

import math

import pytest
import synthetic
import torch
from synthetic import CUTS, MODES, SyntheticLoss, ValueLoss, gradients, make_batch, make_engine
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.engines.train.base import TrainEngine
from tandem.errors import CheckpointError, DataError, EngineError, NonFiniteError
from tandem.protocol import DataProto

LOG_PROBS = frozenset({"log_probs"})


@pytest.fixture(scope="module")
def engine(folder):
    """Return an engine for tests that do not change the weights."""
    return make_engine(folder)


def reference_gradients(folder, batch, mode):
    """Compute the same loss with transformers' own forward, one sequence at a time, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    mask = batch.ragged("response_mask")
    tokens = int(mask.values.sum())
    answers = [int(row.sum()) for row in mask]
    sequences = sum(count > 0 for count in answers)
    loss = torch.zeros((), dtype=torch.float64)
    for i, ids in enumerate(batch.ragged("tokens")):
        log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        picked = log_p.gather(1, ids[1:, None])[:, 0]
        advantage, old, ref = (
            batch.ragged(name).row(i)[1:] for name in ("advantages", "old_log_probs", "ref_log_probs")
        )
        ratio, gap = (picked - old).exp(), ref - picked
        values = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        values = values + 0.05 * (log_p.exp() * log_p).sum(-1) + 0.1 * (gap.exp() - gap - 1)
        total = (values * mask.row(i)[1:]).sum()
        loss = (
            loss
            + {
                "token-mean": total / tokens,
                "token-sum": total,
                "seq-mean-token-sum": total / sequences,
                "seq-mean-token-sum-norm": total / sequences / 20,
                "seq-mean-token-mean": total / max(1, answers[i]) / sequences,
            }[mode]
        )
    loss.backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters()}, float(loss.detach())


def test_is_a_train_engine(engine):
    assert isinstance(engine, TrainEngine)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_equals_a_plain_loop_however_it_is_cut(folder, engine, mode):
    batch = make_batch()
    wanted, loss = reference_gradients(folder, batch, mode)
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    for cut, micro in CUTS.items():
        found, metrics = gradients(engine, batch, SyntheticLoss(mode), micro)
        assert synthetic.relative_difference(found, wanted) <= 1e-9, cut
        assert metrics["loss"] == pytest.approx(loss, rel=1e-9)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert metrics["tokens"] == int(batch.ragged("response_mask").values.sum())
        assert metrics["sequences"] == sum(bool(row.any()) for row in batch.ragged("response_mask"))


@pytest.mark.parametrize(
    ("model", "fsdp"),
    [
        ({"enable_gradient_checkpointing": False}, {}),
        ({"use_remove_padding": False}, {}),
        ({"enable_gradient_checkpointing": False, "use_remove_padding": False}, {}),
        ({}, {"forward_prefetch": True, "reshard_after_forward": False}),
    ],
)
def test_how_it_is_run_changes_nothing(folder, engine, model, fsdp):
    other = make_engine(folder, model=model, fsdp=fsdp)
    batch = make_batch()
    for cut in ("three", "tokens"):
        first, _ = gradients(engine, batch, SyntheticLoss(), CUTS[cut])
        second, _ = gradients(other, batch, SyntheticLoss(), CUTS[cut])
        assert synthetic.relative_difference(second, first) <= 1e-12


def test_fp32_cuts_agree(folder):
    engine = make_engine(folder, precision="fp32")
    batch = make_batch(torch.float32)
    wanted, _ = gradients(engine, batch, SyntheticLoss(), CUTS["all"])
    for cut in ("one", "three", "tokens"):
        found, _ = gradients(engine, batch, SyntheticLoss(), CUTS[cut])
        assert synthetic.relative_difference(found, wanted) <= 1e-5, cut


def test_bf16_computes_in_bf16_over_fp32_weights(folder):
    exact = make_engine(folder)
    half = make_engine(folder, fsdp={"model_dtype": "fp32", "dtype": "bf16"})
    batch = make_batch(torch.float32)
    wanted, _ = gradients(exact, make_batch(), SyntheticLoss(), CUTS["three"])
    found, _ = gradients(half, batch, SyntheticLoss(), CUTS["three"])
    assert 1e-4 < synthetic.relative_difference(found, wanted) < 0.25
    assert all(value.dtype == torch.float32 for _, value in half.weights())
    with half.unsharded() as module:
        assert module.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    out = half.forward(batch, outputs=LOG_PROBS, micro=CUTS["all"])
    assert out.ragged("log_probs").dtype == torch.float32


def test_forward_restores_the_order_and_leaves_other_tokens_zero(engine):
    batch = make_batch()
    outputs = frozenset({"log_probs", "entropy"})
    whole = engine.forward(batch, outputs=outputs, micro=CUTS["all"])
    mask = batch.ragged("response_mask").values
    for name in outputs:
        values = whole.ragged(name).values
        assert bool((values[~mask] == 0).all()) and bool((values[mask] != 0).all())
        for cut in ("one", "three", "tokens"):
            part = engine.forward(batch, outputs=outputs, micro=CUTS[cut])
            assert torch.allclose(part.ragged(name).values, values, atol=1e-12, rtol=0)
            assert torch.equal(part.ragged(name).offsets, batch.ragged("tokens").offsets)


def test_forward_of_no_rows(engine):
    out = engine.forward(make_batch()[:0], outputs=LOG_PROBS, micro=CUTS["three"])
    assert len(out) == 0 and len(out.ragged("log_probs").values) == 0


def test_reads_after_a_step_are_fresh(folder):
    """A forward leaves FSDP's root gathered, but reads after an update must see the new weights."""
    engine = make_engine(folder)
    batch = make_batch()
    before = engine.forward(batch, outputs=LOG_PROBS, micro=CUTS["all"]).ragged("log_probs").values
    with engine.unsharded() as module:
        old = module.get_input_embeddings().weight.detach().clone()
    engine.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    after = engine.forward(batch, outputs=LOG_PROBS, micro=CUTS["all"]).ragged("log_probs").values
    with engine.unsharded() as module:
        seen = module.get_input_embeddings().weight.detach().clone()
        ids = batch.ragged("tokens").row(2)
        module.set_attn_implementation("sdpa")
        direct = torch.log_softmax(module(ids[None], use_cache=False).logits[0, :-1], -1)
        module.set_attn_implementation("tandem_packed")
    assert not torch.equal(before, after) and not torch.equal(old, seen)
    assert torch.equal(seen, dict(engine.weights())["model.embed_tokens.weight"])
    row = batch.ragged("tokens").with_values(after).row(2)[1:]
    wanted = direct.gather(1, ids[1:, None])[:, 0] * batch.ragged("response_mask").row(2)[1:]
    assert torch.allclose(row, wanted, atol=1e-12)
    engine.train_step(batch, SyntheticLoss(), micro=CUTS["three"])


def test_update_is_clipped_adamw_at_the_scheduled_rate(folder):
    optim = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "clip_grad": 0.05, "lr_warmup_steps": 2}
    engine = make_engine(folder, optim=optim)
    batch = make_batch()
    reference = {name: torch.nn.Parameter(value) for name, value in synthetic.weights(engine).items()}
    decayed = [p for name, p in reference.items() if p.ndim == 2]  # no norms, no biases
    spared = {"params": [p for p in reference.values() if p.ndim == 1], "weight_decay": 0.0}
    groups = [{"params": decayed}, spared]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-8)
    for lr in (0.0, 0.005, 0.01, 0.01):
        found, metrics = gradients(engine, batch, SyntheticLoss(), CUTS["three"])
        engine.version -= 1
        assert metrics["grad_norm"] > 0.05
        for name, parameter in reference.items():
            parameter.grad = found[f"model.{name}"] * (0.05 / (metrics["grad_norm"] + 1e-6))
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        metrics = engine.train_step(batch, SyntheticLoss(), micro=CUTS["three"]).to_floats()
        assert metrics["lr"] == lr
        assert synthetic.relative_difference(synthetic.weights(engine), reference) <= 1e-10
    assert engine.version == 4


def test_a_short_gradient_is_left_alone(folder):
    batch = make_batch()
    wide, wider = (make_engine(folder, optim={"clip_grad": limit}) for limit in (1e3, 1e6))
    for engine in (wide, wider):
        engine.train_step(batch, SyntheticLoss(), micro=CUTS["all"])
    pairs = zip(wide.weights(), wider.weights(), strict=True)
    assert all(torch.equal(first, second) for (_, first), (_, second) in pairs)


@pytest.mark.parametrize(
    ("scale", "field"), [(math.nan, "loss"), (math.inf, "loss"), (1e306, "gradient norm")]
)
def test_non_finite_changes_nothing(folder, scale, field):
    engine = make_engine(folder)
    batch = make_batch()
    engine.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    before = synthetic.weights(engine)
    with pytest.raises(NonFiniteError, match=f"the {field} is not finite") as caught:
        engine.train_step(batch, SyntheticLoss(scale=scale), micro=CUTS["three"])
    assert caught.value.field == field and engine.version == 1
    assert all(torch.equal(value, before[name]) for name, value in engine.weights())
    engine.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    straight = make_engine(folder)
    for _ in range(2):
        straight.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    pairs = zip(engine.weights(), straight.weights(), strict=True)
    assert all(torch.equal(first, second) for (_, first), (_, second) in pairs)


def test_a_step_broken_off_is_not_built_upon(folder):
    engine = make_engine(folder)
    batch = make_batch()
    before = synthetic.weights(engine)

    class Interrupted(SyntheticLoss):
        calls = 0

        def __call__(self, *args):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().__call__(*args)

    with pytest.raises(KeyboardInterrupt):
        engine.train_step(batch, Interrupted(), micro=CUTS["one"])
    assert all(torch.equal(value, before[name]) for name, value in engine.weights())
    with pytest.raises(EngineError, match="interrupted"):
        engine.train_step(batch, SyntheticLoss(), micro=CUTS["one"])


def test_a_batch_that_does_not_serve(engine):
    batch = make_batch()
    nothing = torch.zeros_like(batch.ragged("response_mask").values)
    empty = DataProto({**batch.batch, "response_mask": batch.ragged("tokens").with_values(nothing)})
    with pytest.raises(DataError, match="no response token"):
        engine.train_step(empty, SyntheticLoss(), micro=CUTS["all"])
    batch.pop(["advantages"])
    with pytest.raises(DataError, match="advantages"):
        engine.train_step(batch, SyntheticLoss(), micro=CUTS["all"])


def test_save_and_load_go_on_bit_for_bit(folder, tmp_path):
    batch = make_batch()
    engine = make_engine(folder)
    for _ in range(2):
        engine.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    engine.save(tmp_path)
    resumed = make_engine(folder)
    resumed.load(tmp_path)
    assert resumed.version == 2
    for _ in range(2):
        for one in (engine, resumed):
            one.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    pairs = zip(engine.weights(), resumed.weights(), strict=True)
    assert all(torch.equal(first, second) for (_, first), (_, second) in pairs)


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


def test_weights_are_hugging_faces(folder, engine):
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = dict(engine.weights())
    assert list(found) == [name for name, _ in stored.named_parameters()]
    assert all(torch.equal(found[name], p) for name, p in stored.named_parameters())


def test_value_engine_learns_its_targets(folder):
    critic = make_engine(folder, kind="value", optim={"lr": 1e-2})
    batch = make_batch()
    micro, outputs = CUTS["tokens"], frozenset({"values"})
    assert critic.forward(batch, outputs=outputs, micro=micro).ragged("values").values.abs().max() == 0
    for _ in range(15):
        critic.train_step(batch, ValueLoss(), micro=micro)
    mask = batch.ragged("response_mask").values
    values = critic.forward(batch, outputs=outputs, micro=micro).ragged("values").values
    errors = (values - batch.ragged("advantages").values)[mask].square().mean()
    assert errors < 0.5 * batch.ragged("advantages").values[mask].square().mean()


def test_frozen_engine(folder):
    reference = make_engine(folder, frozen=True)
    batch = make_batch()
    reference.forward(batch, outputs=LOG_PROBS, micro=CUTS["all"])
    with pytest.raises(EngineError, match="frozen"):
        reference.train_step(batch, SyntheticLoss(), micro=CUTS["all"])
    info = reference.state_info()
    assert "optimizer@cpu" not in info and info["parameters@cpu"] == 8 * info["parameters"]


def test_offload_on_a_cpu_moves_nothing(folder):
    engine = make_engine(folder, fsdp={"param_offload": True, "optimizer_offload": True})
    batch = make_batch()
    assert engine.state_info()["offload_applies"] is False
    engine.offload()
    engine.onload(optimizer=True)
    found, _ = gradients(engine, batch, SyntheticLoss(), CUTS["all"])
    wanted, _ = gradients(make_engine(folder), batch, SyntheticLoss(), CUTS["all"])
    assert synthetic.relative_difference(found, wanted) == 0


def test_temperature_divides_the_logits(folder):
    batch = make_batch()
    warm = make_engine(folder, temperature=2.0, frozen=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    got = warm.forward(
        DataProto({"tokens": batch.ragged("tokens")}), outputs=LOG_PROBS, micro=CUTS["all"]
    ).ragged("log_probs")
    ids = batch.ragged("tokens").row(1)
    log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / 2.0, -1)
    assert torch.allclose(got.row(1)[1:], log_p.gather(1, ids[1:, None])[:, 0], atol=1e-12)


def test_weights_of_another_engine_replace_ones_own(folder):
    source, target = make_engine(folder), make_engine(folder, frozen=True)
    batch, micro = make_batch(), CUTS["all"]
    source.train_step(batch, SyntheticLoss(), micro=micro)
    before = target.forward(batch, outputs=LOG_PROBS, micro=micro).ragged("log_probs").values
    target.load_weights(synthetic.weights(source).items(), 5)
    assert target.version == 5
    found = target.forward(batch, outputs=LOG_PROBS, micro=micro).ragged("log_probs").values
    wanted = source.forward(batch, outputs=LOG_PROBS, micro=micro).ragged("log_probs").values
    assert torch.equal(found, wanted) and not torch.equal(found, before)
    with target.unsharded() as module:  # what a rollout would sample from
        embedding = module.get_input_embeddings().weight.detach().clone()
    assert torch.equal(embedding, synthetic.weights(source)["model.embed_tokens.weight"])


def test_weights_that_do_not_fit_are_named(folder):
    engine = make_engine(folder, frozen=True)
    weights = synthetic.weights(engine)
    norm = weights["model.norm.weight"]
    with pytest.raises(EngineError, match="missing") as caught:
        engine.load_weights([(n, v) for n, v in weights.items() if n != "model.norm.weight"], 1)
    assert caught.value.field == "model.norm.weight"
    for extra in ("lm_head.weight", "model.norm.weight"):
        with pytest.raises(EngineError, match="unknown") as caught:
            engine.load_weights([*weights.items(), (extra, norm)], 1)
        assert caught.value.field == extra
    with pytest.raises(EngineError, match="shape") as caught:
        engine.load_weights((weights | {"model.norm.weight": norm[1:]}).items(), 1)
    assert caught.value.field == "model.norm.weight"
    assert (caught.value.got, caught.value.expected) == ((31,), (32,))
    assert engine.version == 0


def test_one_rank_has_no_collectives(folder):
    engine = make_engine(folder)
    engine.train_step(make_batch(), SyntheticLoss(), micro=CUTS["three"])
    with engine.unsharded():
        pass
    synthetic.weights(engine)
    assert engine.take_collectives() == (0.0, 0)


@pytest.mark.parametrize("cut", list(CUTS))
@pytest.mark.parametrize("remove_padding", [True, False])
def test_scores_are_transformers_own(scorer_folder, cut, remove_padding):
    """Scores equal those of transformers' classifier on one sequence at a time, in float64."""
    engine = make_engine(
        scorer_folder, kind="score", frozen=True, model={"use_remove_padding": remove_padding}
    )
    batch = make_batch()
    scores = engine.forward(batch, outputs=frozenset({"scores"}), micro=CUTS[cut]).ragged("scores")
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
    ("kind", "output"), [("policy", "log_probs"), ("value", "values"), ("score", "scores")]
)
def test_an_empty_share_has_the_type_of_a_full_one(folder, scorer_folder, kind, output):
    engine = make_engine(scorer_folder if kind == "score" else folder, kind=kind, frozen=True)
    batch, outputs = make_batch(), frozenset({output})
    full = engine.forward(batch, outputs=outputs, micro=CUTS["three"]).ragged(output)
    empty = engine.forward(batch[:0], outputs=outputs, micro=CUTS["three"]).ragged(output)
    assert (len(empty), len(empty.values), empty.dtype) == (0, 0, full.dtype)
