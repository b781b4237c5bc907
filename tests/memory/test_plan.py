"""The plan of a run: byte counts of a config, computed by hand."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.load import load_train_config
from tandem.memory.levers import levers, with_value
from tandem.memory.plan import GIB, plan
from tandem.memory.shapes import model_shape, published
from tests.engines.rollout.case import native, request
from tests.support.marks import slow_but
from tests.support.words import words

NAME = "Qwen/Qwen2.5-7B"
P = 7_615_616_512
BASE = words(
    f"M.path={NAME} G.adv_estimator=grpo T.n_gpus_per_node=8 R.n=8 D.train_batch_size=64",
    "A.ppo_mini_batch_size=64 D.max_prompt_length=1024 D.max_response_length=1024",
    "A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=8192",
)
"""64 prompts with 8 responses of 2,048 tokens at most: 16 micro-batches of 8,192 tokens per rank."""


def shapes(path):
    return model_shape(published(path))


def config_of(*given):
    return load_train_config(None, [*BASE, *words(*given)], elsewhere=True).config


def made(*given, device=80 * GIB):
    return plan(config_of(*given), shapes, device)


def phases(found):
    return {phase.name: phase for phase in found.phases}


def update(*given, **more):
    """Return the bytes of the actor's update by part."""
    return phases(made(*given, **more))["actor update"].parts


def test_shards_of_weights_and_moments():
    assert update()["weights"] == pytest.approx(4 * P / 8)
    assert update()["optimizer"] == pytest.approx(8 * P / 8)


def test_several_micro_batches_reduced_once_keep_the_whole_gradient():
    one = "FS.gradient_sync=once A.ppo_max_token_len_per_gpu=131072"
    assert update("FS.gradient_sync=once")["gradients"] > 4 * 0.8 * P
    assert update("FS.gradient_sync=each")["gradients"] < 4 * 0.5 * P
    assert update(one)["gradients"] < 4 * 0.5 * P


@pytest.mark.parametrize(("device", "when"), [(80, "in each"), (400, "in the last")])
def test_gradients_are_reduced_once_where_that_takes_an_eighth_of_the_device(device, when):
    """The weights in bf16 and the gradient in fp32: 45.7 GB for 7.6 billion numbers."""
    notes = made(device=device * GIB).notes
    assert any(note.startswith("actor update") and f"reduced {when}" in note for note in notes)


def test_offload_frees_the_device_between_phases_and_fills_the_host():
    stays, moves = made(), made("FS.param_offload=true FS.optimizer_offload=true")
    gained = phases(stays)["rollout"].parts["optimizer"] - phases(moves)["rollout"].parts["optimizer"]
    assert gained == pytest.approx(P)
    assert stays.host["offloaded"] == 0 and moves.host["offloaded"] == pytest.approx(12 * P)
    before, after = phases(stays)["actor update"].parts, phases(moves)["actor update"].parts
    assert before["optimizer"] == after["optimizer"]


@pytest.mark.parametrize(("name", "each"), [("adamw", 8), ("adamw_8bit", 2 + 1 / 32), ("adamw_cpu", 0)])
def test_the_optimizers_state(name, each):
    found = made(f"A.optim.optimizer={name}")
    assert phases(found)["actor update"].parts["optimizer"] == pytest.approx(each * P / 8)
    assert found.host["offloaded"] == pytest.approx(8 * P if name == "adamw_cpu" else 0)


def test_muon_keeps_one_moment_of_the_layers_matrices():
    layers = P - 2 * 152064 * 3584 - 3584
    found = update("A.optim.optimizer=muon")
    assert found["optimizer"] == pytest.approx((8 * P - 4 * layers) / 8)


def test_adapters_learn_alone():
    found = update("M.lora_rank=16")
    wide = 2 * (28 + 4) * 128 + 3 * 18944 + 7 * 3584  # inputs and outputs of the seven linear layers
    adapters = 28 * 16 * wide
    assert found["optimizer"] == pytest.approx(8 * adapters / 8)
    assert found["weights"] == pytest.approx((2 * P + 4 * adapters) / 8)


def test_the_cache_is_what_its_sequences_need_and_what_the_device_leaves():
    """Each rank has 64 sequences of 2,048 tokens of 56 KiB: 7 GiB. Of 32 GiB, 2 GiB stay free."""
    assert phases(made())["rollout"].parts["cache"] == 64 * 2048 * 56 * 1024
    tight = made(device=32 * GIB)
    held = 12 * P / 8 + 2 * P
    assert phases(tight)["rollout"].parts["cache"] == pytest.approx(30 * GIB - held, rel=1e-3)
    assert any("sequences of 2048 tokens at a time" in note for note in tight.notes)


_QWEN = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2}
_CACHED = {
    "none": ("qwen3", {}, 6, 32),
    "short": ("qwen3", _QWEN | {"sliding_window": 64}, 2, 32 + 2 * 9),
    "long": ("qwen3", _QWEN | {"sliding_window": 4096}, 6, 32),
    "gemma3": ("gemma3_text", {"sliding_window": 64}, 1, 32 + 5 * 9),
    "gpt-oss": ("gpt_oss", {"sliding_window": 100, "num_local_experts": 4}, 3, 32 + 12),
    "llama4": ("llama4_text", {"attention_chunk_size": 128, "num_local_experts": 4}, 1, 32 + 5 * 13),
}
"""By name: model type, windows, layers of a group, and the blocks of 16 tokens in all groups."""


@pytest.mark.parametrize("name", slow_but(("short", "gpt-oss"), _CACHED))
def test_a_sequence_takes_of_the_cache_what_the_engine_gives_it(name):
    """Here with a prompt of 64 tokens at most, computed at once. The model has 6 layers of 2 heads."""
    kind, windows, layers, blocks = _CACHED[name]
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(kind, **sizes, **windows)
    asked = "D.max_prompt_length=64 D.max_response_length=436 R.num_gpu_blocks_override=null R.n=1"
    small = plan(config_of(asked), lambda path: model_shape(config.to_dict()), 80 * GIB)
    [rollout] = [phase for phase in small.phases if phase.name == "rollout"]
    engine = native(AutoModelForCausalLM.from_config(config).bfloat16(), max_length=500)
    engine.submit([request(prompt=64, max_tokens=436)])
    engine.poll(0.0)
    one = rollout.parts["cache"] - rollout.flexible
    assert one == engine._store.cache.bytes
    assert one == 16 * blocks * layers * 2 * 2 * 16 * 2  # tokens, layers, keys and values, heads, features


def test_vllm_takes_its_share_of_the_whole_device():
    vllm = "R.name=vllm R.gpu_memory_utilization=0.4"
    share = pytest.approx(0.4 * 80 * GIB)
    assert phases(made(vllm))["rollout"].parts["engine"] == share
    assert update(vllm)["engine"] == 0
    assert update(vllm, "R.free_cache_engine=false")["engine"] == share


def test_sequence_and_tensor_parallel_and_stages_take_their_part():
    once = "FS.gradient_sync=once"
    alone, tensor = update(once), update(once, "FS.tensor_parallel_size=4")
    assert tensor["gradients"] == pytest.approx(alone["gradients"] / 4, rel=0.05)
    assert tensor["weights"] == pytest.approx(alone["weights"], rel=0.01)
    stages = update(once, "FS.pipeline_parallel_size=2")
    assert stages["gradients"] < 0.6 * alone["gradients"]


def test_a_critic_and_a_reference_lie_beside_the_actor():
    named = phases(made("GAE A.use_kl_loss=true"))
    assert {"values", "critic update", "ref log-probs", "load critic", "load ref"} <= named.keys()
    critic = 12 * (P - 152064 * 3584) / 8  # no head
    assert named["actor update"].parts["others"] == pytest.approx(critic + 4 * P / 8, rel=1e-3)
    apart = phases(made("GAE T.n_gpus_per_node=12 Q={a: [8], b: [4]} P={actor_rollout: a, critic: b}"))
    assert apart["critic update"].pool == "b"
    assert apart["actor update"].parts["others"] == 0


def test_each_of_several_references_and_reward_models_is_counted():
    """All are on the device together with the actor: 4 bytes per number and rank."""
    small, smaller = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-0.5B"
    found = made(
        f"A.use_kl_loss=true REF.models={{near: {{}}, far: {{path: {small}}}}} RM.enable=true",
        f"RM.models={{a: {{path: {small}}}, b: {{path: {smaller}}}}}",
    )
    named = phases(found)
    assert {"ref log-probs of near", "ref log-probs of far", "rewards of a", "rewards of b"} <= named.keys()
    of = {name: shapes(name) for name in (small, smaller)}
    scored = sum(shape.parameters for shape in of.values())  # tied embeddings; the head has one number
    others = 4 * (P + of[small].parameters + scored) / 8
    assert named["actor update"].parts["others"] == pytest.approx(others, rel=1e-3)
    assert named["rewards of b"].parts["weights"] < named["rewards of a"].parts["weights"]


def test_a_checkpoint_holds_weights_and_moments_once():
    assert made().disk["checkpoint"] == pytest.approx(12 * P)
    tensor = made("FS.tensor_parallel_size=4")
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
    cpu = update("T.device=cpu T.backend=ray A.optim.optimizer=adamw_cpu")
    assert cpu["optimizer"] == pytest.approx(8 * P / 8)
