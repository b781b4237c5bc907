"""Router losses, biases and metrics of a mixture, against plain loops over sequences and tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

from tandem.errors import ConfigError
from tandem.models.double_precision import double_precision
from tests.engines.train import synthetic
from tests.engines.train.models import EXPERTS, NO_IDS, UNTIED
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import CUTS, KEPT, SyntheticLoss, ValueLoss, make_batch, make_engine

E, K, LAYERS = 4, 2, 2
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **UNTIED | NO_IDS, num_experts=E, num_experts_per_tok=K, moe_intermediate_size=12, head_dim=8
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**UNTIED, "num_key_value_heads": 4} | NO_IDS | LATENT,
        **{"n_routed_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 12, "n_group": 2},
        **{"topk_group": 2, "first_k_dense_replace": 0, "n_shared_experts": 1},
    ),
    "gpt_oss": lambda: GptOssConfig(**UNTIED | EXPERTS | NO_IDS, head_dim=8),
}
AUX, Z = 0.3, 0.2
LOSSES = {"router_aux_loss_coef": AUX, "router_z_loss_coef": Z}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config()).double()
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.normal_(std=0.05)
        model.save_pretrained(folder / name)
    return folder


def seen_by_routers(model, ids):
    """Return (logits, chosen) of each layer for one sequence's input tokens."""
    seen, hooks = [], []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or layer.mlp.router
        hooks.append(router.register_forward_hook(lambda *args: seen.append((args[2][0], args[2][2]))))
    model(ids[None])
    for hook in hooks:
        hook.remove()
    return seen


def reference(folder, batch):
    """Return the router losses' gradients and value, the loads (LAYERS, E) and the entropy, by loops."""
    with double_precision():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        sequences = [ids[: max(1, len(ids) - 1)] for ids in batch.ragged("tokens")]
        tokens, loss, entropy = sum(map(len, sequences)), 0, 0
        tokens_of_loss = sum(len(ids) - 1 for ids in batch.ragged("tokens"))
        loads = torch.zeros(LAYERS, E, dtype=torch.float64)
        for ids in sequences:
            for layer, (logits, chosen) in enumerate(seen_by_routers(model, ids)):
                scores = logits.sigmoid() if "deepseek" in str(folder) else logits.softmax(-1)
                scores = scores / scores.sum(-1, keepdim=True)
                uses = torch.zeros(E, dtype=torch.float64)
                for row in chosen:
                    for expert in row:
                        uses[expert] += 1
                loads[layer] += uses
                f, p = uses * E / (K * len(ids)), scores.sum(0) / len(ids)
                z = torch.logsumexp(logits, -1).square().sum() / tokens_of_loss
                loss = loss + AUX * (f * p).sum() / len(sequences) + Z * z
                entropy -= float((scores * scores.log()).sum().detach()) / tokens / LAYERS
        loss.backward()
    grads = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, float(loss.detach()), loads, entropy


def engine_of(folder, kept="full", mixture=LOSSES, **options):
    return make_engine(folder, model={"mixture": mixture, **KEPT[kept]}, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_router_losses_and_metrics_equal_a_loop_over_tokens(mixtures, name):
    batch = make_batch()
    wanted, loss, loads, entropy = reference(mixtures / name, batch)
    for kept, cut in (("none", "all"), ("full", "one"), ("full", "tokens"), ("ops", "three")):
        engine = engine_of(mixtures / name, kept)
        found, metrics = synthetic.gradients(engine, batch, SyntheticLoss(scale=0.0), CUTS[cut])
        found = {key: value for key, value in found.items() if key in wanted}
        assert synthetic.relative_difference(found, wanted) <= 1e-6, (kept, cut)
        assert metrics["router/loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["router/entropy"] == pytest.approx(entropy, rel=1e-6)
        shares = loads / loads.mean(1, keepdim=True)
        for expert in range(E):
            assert metrics[f"router/load/expert_{expert}"] == pytest.approx(float(shares[:, expert].mean()))
        assert metrics["router/load_max"] == pytest.approx(float(shares.amax(1).mean()))
        assert metrics["router/load_min"] == pytest.approx(float(shares.amin(1).mean()))
        assert metrics["router/idle_experts"] == pytest.approx(float((loads == 0).double().mean()))


def test_a_critic_has_router_losses(mixtures):
    batch, folder = make_batch(), mixtures / "qwen3_moe"
    metrics = engine_of(folder, kind="value").train_step(batch, ValueLoss(), micro=CUTS["three"])
    assert metrics.to_floats()["router/loss"] == pytest.approx(reference(folder, batch)[1], rel=1e-6)


def test_biases_move_towards_balanced_loads_and_are_saved(mixtures, tmp_path):
    folder, rate = mixtures / "deepseek_v3", 0.01
    _, _, loads, _ = reference(folder, make_batch())
    engine = engine_of(folder, mixture={"router_bias_update_rate": rate})
    before = [getattr(*bias).clone() for bias in engine.module.mixtures.biases]
    engine.train_step(make_batch(), SyntheticLoss(), micro=CUTS["three"])
    for layer, bias in enumerate(engine.module.mixtures.biases):
        moved = rate * (loads[layer].mean() - loads[layer]).sign()
        torch.testing.assert_close(getattr(*bias), before[layer] + moved.to(before[layer]))
    engine.save(tmp_path)
    other = engine_of(folder, mixture={"router_bias_update_rate": rate})
    other.load(tmp_path)
    for mine, loaded in zip(engine.module.mixtures.biases, other.module.mixtures.biases, strict=True):
        assert torch.equal(getattr(*mine), getattr(*loaded))


def test_frozen_routers_do_not_learn(mixtures):
    engine = engine_of(mixtures / "qwen3_moe", mixture={"freeze_router": True})
    before = synthetic.weights(engine)
    engine.train_step(make_batch(), SyntheticLoss(), micro=CUTS["three"])
    same = {name for name, value in synthetic.weights(engine).items() if torch.equal(value, before[name])}
    assert same == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}


def test_what_a_model_cannot_have_is_refused(mixtures, folder):
    with pytest.raises(ConfigError, match="no mixture") as caught:
        engine_of(folder, mixture={"router_z_loss_coef": 0.1})
    assert caught.value.field == "model.mixture.router_z_loss_coef"
    with pytest.raises(ConfigError, match="no bias"):
        engine_of(mixtures / "qwen3_moe", mixture={"router_bias_update_rate": 0.1})
    with pytest.raises(ConfigError, match="adapters leave"):
        make_engine(
            mixtures / "deepseek_v3", model={"mixture": {"router_bias_update_rate": 0.1}, "lora_rank": 2}
        )


def losses_here(folder):
    engine, batch = engine_of(folder), make_batch()
    if engine.share.size > 1:
        batch = batch[:7] if engine.share.rank == 0 else batch[7:]
    return synthetic.gradients(engine, batch, SyntheticLoss(), CUTS["three"])


def test_two_ranks_have_the_losses_and_metrics_of_one(mixtures):
    wanted, alone = losses_here(mixtures / "qwen3_moe")
    for found, metrics in on_ranks(losses_here, mixtures / "qwen3_moe"):
        assert synthetic.relative_difference(found, wanted) <= 1e-9
        for name in alone:
            if name.startswith("router/"):
                assert metrics[name] == pytest.approx(alone[name], rel=1e-9), name
