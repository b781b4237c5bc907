"""The plan of a run: byte counts of a config, computed by hand."""

import pytest

from tandem.config.load import load_train_config
from tandem.memory.levers import levers, with_value
from tandem.memory.plan import GIB, plan
from tandem.memory.shapes import model_shape, published

NAME = "Qwen/Qwen2.5-7B"
P = 7_615_616_512
BASE = (
    f"actor_rollout_ref.model.path={NAME}",
    *("algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.n=8"),
    *("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"),
    *("data.max_prompt_length=1024", "data.max_response_length=1024"),
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
)


def shapes(path):
    return model_shape(published(path))


def config_of(*words):
    return load_train_config(None, [*BASE, *words], elsewhere=True).config


def made(*words, device=80 * GIB):
    return plan(config_of(*words), shapes, device)


def phases(found):
    return {phase.name: phase for phase in found.phases}


def test_shards_of_weights_and_moments():
    update = phases(made())["actor update"]
    assert update.parts["weights"] == pytest.approx(4 * P / 8)
    assert update.parts["optimizer"] == pytest.approx(8 * P / 8)


def test_several_micro_batches_reduced_once_keep_the_whole_gradient():
    """64 prompts with 8 responses of 2,048 tokens are 16 micro-batches of 8,192 tokens per rank."""
    sync = "actor_rollout_ref.actor.fsdp_config.gradient_sync"
    several = phases(made(f"{sync}=once"))["actor update"]
    assert several.parts["gradients"] > 4 * 0.8 * P
    each = phases(made(f"{sync}=each"))["actor update"]
    assert each.parts["gradients"] < 4 * 0.5 * P
    one = phases(made(f"{sync}=once", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=131072"))[
        "actor update"
    ]
    assert one.parts["gradients"] < 4 * 0.5 * P


@pytest.mark.parametrize(("device", "when"), [(80, "in each"), (400, "in the last")])
def test_gradients_are_reduced_once_where_that_takes_an_eighth_of_the_device(device, when):
    """The weights in bf16 and the gradient in fp32: 45.7 GB for 7.6 billion numbers."""
    notes = made(device=device * GIB).notes
    assert any(note.startswith("actor update") and f"reduced {when}" in note for note in notes)


def test_offload_frees_the_device_between_phases_and_fills_the_host():
    section = "actor_rollout_ref.actor.fsdp_config"
    stays = made()
    moves = made(f"{section}.param_offload=true", f"{section}.optimizer_offload=true")
    gained = phases(stays)["rollout"].parts["optimizer"] - phases(moves)["rollout"].parts["optimizer"]
    assert gained == pytest.approx(P)
    assert stays.host["offloaded"] == 0 and moves.host["offloaded"] == pytest.approx(12 * P)
    before, after = phases(stays)["actor update"].parts, phases(moves)["actor update"].parts
    assert before["optimizer"] == after["optimizer"]


@pytest.mark.parametrize(("name", "each"), [("adamw", 8), ("adamw_8bit", 2 + 1 / 32), ("adamw_cpu", 0)])
def test_the_optimizers_state(name, each):
    found = made(f"actor_rollout_ref.actor.optim.optimizer={name}")
    assert phases(found)["actor update"].parts["optimizer"] == pytest.approx(each * P / 8)
    assert found.host["offloaded"] == pytest.approx(8 * P if name == "adamw_cpu" else 0)


def test_muon_keeps_one_moment_of_the_layers_matrices():
    found = made("actor_rollout_ref.actor.optim.optimizer=muon")
    layers = P - 2 * 152064 * 3584 - 3584
    assert phases(found)["actor update"].parts["optimizer"] == pytest.approx((8 * P - 4 * layers) / 8)


def test_adapters_learn_alone():
    found = phases(made("actor_rollout_ref.model.lora_rank=16"))["actor update"]
    wide = 2 * (28 + 4) * 128 + 3 * 18944 + 7 * 3584  # inputs and outputs of the seven linear layers
    adapters = 28 * 16 * wide
    assert found.parts["optimizer"] == pytest.approx(8 * adapters / 8)
    assert found.parts["weights"] == pytest.approx((2 * P + 4 * adapters) / 8)


def test_the_cache_is_what_its_sequences_need_and_what_the_device_leaves():
    """Each rank has 64 sequences of 2,048 tokens of 56 KiB: 7 GiB.

    Of 32 GiB, 2 GiB stay free. Other data on the device leaves less for the cache.
    """
    assert phases(made())["rollout"].parts["cache"] == 64 * 2048 * 56 * 1024
    tight = made(device=32 * GIB)
    held = 12 * P / 8 + 2 * P
    assert phases(tight)["rollout"].parts["cache"] == pytest.approx(30 * GIB - held, rel=1e-3)
    assert any("sequences of 2048 tokens at a time" in note for note in tight.notes)


def test_vllm_takes_its_share_of_the_whole_device():
    words = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.4")
    found = phases(made(*words))
    assert found["rollout"].parts["engine"] == pytest.approx(0.4 * 80 * GIB)
    assert found["actor update"].parts["engine"] == 0
    awake = phases(made(*words, "actor_rollout_ref.rollout.free_cache_engine=false"))
    assert awake["actor update"].parts["engine"] == pytest.approx(0.4 * 80 * GIB)


def test_sequence_and_tensor_parallel_and_stages_take_their_part():
    section = "actor_rollout_ref.actor"
    once = f"{section}.fsdp_config.gradient_sync=once"
    alone = phases(made(once))["actor update"].parts
    tensor = phases(made(once, f"{section}.fsdp_config.tensor_parallel_size=4"))["actor update"].parts
    assert tensor["gradients"] == pytest.approx(alone["gradients"] / 4, rel=0.05)
    assert tensor["weights"] == pytest.approx(alone["weights"], rel=0.01)
    stages = phases(made(once, f"{section}.fsdp_config.pipeline_parallel_size=2"))["actor update"].parts
    assert stages["gradients"] < 0.6 * alone["gradients"]


def test_a_critic_and_a_reference_lie_beside_the_actor():
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    found = made("algorithm.adv_estimator=gae", kl)
    named = phases(found)
    assert {"values", "critic update", "ref log-probs", "load critic", "load ref"} <= named.keys()
    critic = 12 * (P - 152064 * 3584) / 8  # no head
    assert named["actor update"].parts["others"] == pytest.approx(critic + 4 * P / 8, rel=1e-3)
    apart = made(
        "algorithm.adv_estimator=gae",
        "trainer.n_gpus_per_node=12",
        "trainer.resource_pools={a: [8], b: [4]}",
        "trainer.placement={actor_rollout: a, critic: b}",
    )
    assert phases(apart)["critic update"].pool == "b"
    assert phases(apart)["actor update"].parts["others"] == 0


def test_each_of_several_references_and_reward_models_is_counted():
    """All are on the device together with the actor: 4 bytes per number and rank."""
    small, smaller = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-0.5B"
    found = made(
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.ref.models={{near: {{}}, far: {{path: {small}}}}}",
        "reward_model.enable=true",
        f"reward_model.models={{a: {{path: {small}}}, b: {{path: {smaller}}}}}",
    )
    named = phases(found)
    assert {"ref log-probs of near", "ref log-probs of far", "rewards of a", "rewards of b"} <= named.keys()
    of = {name: shapes(name) for name in (small, smaller)}
    scored = sum(
        shape.parameters for shape in of.values()
    )  # embeddings are tied, and the head has one number
    others = 4 * (P + of[small].parameters + scored) / 8
    assert named["actor update"].parts["others"] == pytest.approx(others, rel=1e-3)
    assert named["rewards of b"].parts["weights"] < named["rewards of a"].parts["weights"]


def test_a_checkpoint_holds_weights_and_moments_once():
    assert made().disk["checkpoint"] == pytest.approx(12 * P)
    tensor = made("actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=4")
    assert tensor.disk["checkpoint"] == pytest.approx(12 * P, rel=0.01)


def test_each_lever_gains_what_it_says():
    config, device = config_of(), 40 * GIB

    def replan(changed):
        return plan(changed, shapes, device)

    found = levers(config, replan)
    assert found and found == sorted(found, key=lambda lever: (not lever.fits, -lever.gain))
    before = replan(config).worst.needed
    for lever in found:
        after = plan(config_of(*lever.words), shapes, device)
        assert before - after.worst.needed == pytest.approx(lever.gain) and after.fits == lever.fits


def test_a_value_is_changed_in_a_copy():
    config = config_of()
    other = with_value(config, "actor_rollout_ref.rollout.n", 3)
    assert other.actor_rollout_ref.rollout.n == 3 and config.actor_rollout_ref.rollout.n == 8


def test_on_a_cpu_moments_lie_where_the_weights_are():
    assert "adamw_cpu" in str(levers(config_of(), lambda changed: plan(changed, shapes, 24 * GIB)))
    cpu = ("trainer.device=cpu", "trainer.backend=ray")
    update = phases(made(*cpu, "actor_rollout_ref.actor.optim.optimizer=adamw_cpu"))["actor update"]
    assert update.parts["optimizer"] == pytest.approx(8 * P / 8)
