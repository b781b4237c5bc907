"""Values of a config: defaults, keys that inherit, other spellings, and what is computed of them."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest

from tandem.config import tables
from tandem.config.actor import ActorConfig
from tandem.config.batching import Batching
from tandem.config.critic import CriticConfig, CriticModelConfig
from tandem.config.load import load_train_config
from tandem.config.model import ModelConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.rollout_correction import Bounds, RolloutCorrectionConfig
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, value_at
from tandem.config.sources import to_yaml
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.config.written import to_dict
from tandem.protocol import SamplingParams
from tandem.protocol.rollout import LogprobsMode
from tandem.trainer.sampling_params import sampling
from tests.support.words import rows

DEFAULTS = """
data.val_files=[] A.ppo_mini_batch_size=1024 A.clip_ratio_low=0.2 A.clip_ratio_high=0.2 A.loss_agg_mode=null
critic.loss_agg_mode=null A.loss_scale_factor=512.0 REF.log_prob_use_dynamic_bsz=false
REF.log_prob_max_token_len_per_gpu=16384 R.name=native R.gpu_memory_utilization=null
R.tensor_model_parallel_size=1 critic.forward_max_token_len_per_gpu=32768 critic.ppo_mini_batch_size=1024
custom_reward_function.name=compute_score trainer.default_local_dir=runs/tandem/default
trainer.logger=[console] trainer.resume_with_changes=false trainer.max_ckpt_to_keep=null
trainer.keep_best=null
trainer.keep_best_mode=max trainer.async_save=false
A.fsdp_config.use_torch_compile=false REF.fsdp_config.use_torch_compile=false
critic.fsdp_config.use_torch_compile=false reward_model.fsdp_config.use_torch_compile=false
A.fsdp_config.full_determinism=false A.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[]
A.fsdp_config.wrap_policy.min_num_params=0 M.enable_gradient_checkpointing=true
M.gradient_checkpointing_mode=auto M.enable_activation_offload=false M.activation_offload_mode=async
critic.model.enable_gradient_checkpointing=true critic.model.gradient_checkpointing_mode=auto
M.lora_rank=0 M.lora_alpha=16 M.target_modules=[all-linear] M.exclude_modules=[]
critic.model.lora_rank=0 critic.model.lora_alpha=16 critic.model.target_modules=[all-linear]
trainer.timeouts.start=300.0 trainer.timeouts.call=7200.0 trainer.timeouts.answer=30.0
trainer.timeouts.collective=1800.0 trainer.timeouts.resources=60.0 trainer.timeouts.stop=10.0
trainer.cluster.address=null trainer.cluster.interface=null trainer.cluster.master_port=0
trainer.cluster.object_store_gb=null trainer.cluster.temp_dir=null trainer.cluster.ray_init={}
trainer.balance_batch=true trainer.max_restarts=0 trainer.worker_classes={}
REF.reset_interval=0 algorithm.gdpo_reward_keys=[] C.corrects=false C.bypass_mode=false exact_kl=false
needs_critic=true roles=[actor, rollout, critic, reward]
trainer.pools={global_pool: [1]} trainer.world_size=1 trainer.resolved_backend=local
""".replace("\n", " ")
"""Defaults that `test_verl_verdicts.py` does not compare with verl's."""

INHERITED = """
T.seed=7 | D.seed=7
A.clip_ratio=0.3 | A.clip_ratio_low=0.3
A.clip_ratio=0.3 | A.clip_ratio_high=0.3
A.use_dynamic_bsz=true | REF.log_prob_use_dynamic_bsz=true
A.use_dynamic_bsz=true | R.log_prob_use_dynamic_bsz=true
A.use_dynamic_bsz=true | critic.use_dynamic_bsz=true
A.ppo_mini_batch_size=64 | critic.ppo_mini_batch_size=64
A.ppo_epochs=3 | critic.ppo_epochs=3
A.shuffle=true | critic.shuffle=true
A.loss_agg_mode=token-sum | critic.loss_agg_mode=token-sum
critic.ppo_micro_batch_size_per_gpu=8 | critic.forward_micro_batch_size_per_gpu=8
D.max_response_length=99 | A.loss_scale_factor=99.0
"""

VALUES = """
critic.ppo_epochs=2 A.ppo_epochs=5 A.clip_ratio_high=0.28 A.optim.betas=[0.9, 0.95] A.strategy=fsdp
    | critic.ppo_epochs=2 A.clip_ratio_low=0.2 A.clip_ratio_high=0.28 A.optim.betas=[0.9, 0.95]
    A.strategy=fsdp2
critic.strategy=fsdp FS.dtype=bfloat16 FS.model_dtype=float64 T.logger=console R.stop=END
    | critic.strategy=fsdp2 FS.dtype=bf16 FS.model_dtype=fp64 T.logger=[console] R.stop=[END]
GRPO G.adv_kwargs={epsilon: 1e-4} T.logger=["console","tensorboard"]
    | G.adv_kwargs={epsilon: 0.0001} T.logger=[console, tensorboard]
G.adv_estimator=grpo_vectorized R.n=4 | G.adv_estimator=grpo
G.adv_estimator=rloo_vectorized R.n=4 | G.adv_estimator=rloo
G.adv_estimator=vtrace R.n=4 | needs_critic=true roles=[actor, rollout, critic, reward]
G.adv_estimator=maxrl R.n=4 | needs_critic=false roles=[actor, rollout, reward]
G.adv_estimator=remax R.n=4 | needs_critic=false roles=[actor, rollout, reward]
G.adv_estimator=my.module:mine | roles=[actor, rollout, critic, reward]
GRPO G.use_kl_in_reward=true | roles=[actor, rollout, ref, reward]
SCORED | roles=[actor, rollout, critic, reward_model]
G.adv_estimator=my.module:estimator G.gdpo_reward_keys=[format, accuracy]
    | G.gdpo_reward_keys=[format, accuracy]
G.use_kl_in_reward=true G.kl_ctrl={type: adaptive, horizon: 500, target_kl: 0.5}
    | G.kl_ctrl.horizon=500.0 G.kl_ctrl.target_kl=0.5
A.use_kl_loss=true A.kl_loss_type=full | exact_kl=true
G.use_kl_in_reward=true G.kl_penalty=full | exact_kl=true
A.use_kl_loss=true G.use_kl_in_reward=true G.kl_penalty=full | exact_kl=true
A.use_kl_loss=true G.use_kl_in_reward=true | exact_kl=false
A.use_kl_loss=true REF.reset_interval=10 M.lora_rank=4 Q={a: [1], b: [1]} P={actor_rollout: a, ref: b}
    | REF.reset_interval=10
R.n=2 R.n_schedule={100: 8, 5: 4} | R.group_sizes={1: 2, 5: 4, 100: 8}
R.n_schedule.7=3 | R.group_sizes={1: 1, 7: 3}
GRPO L.loss_mode=dro L.dro_beta=0.1 | L.dro_beta=0.1
M.use_fused_kernels=true M.fused_kernel_options.impl_backend=triton T.device=cuda | M.head=triton
M.use_fused_kernels=true M.fused_kernel_options.impl_backend=liger T.device=auto | M.head=liger
M.fused_kernel_options.impl_backend=triton T.device=cpu | M.head=auto
M.use_fused_kernels=null M.fused_kernel_options.impl_backend=auto | M.head=auto critic.model.head=auto
M.use_fused_kernels=false M.fused_kernel_options.impl_backend=auto | M.head=torch critic.model.head=auto
M.use_fused_kernels=true M.fused_kernel_options.impl_backend=auto | M.head=auto critic.model.head=auto
M.attn_implementation=sdpa | M.attn_implementation=torch
M.override_config.rope_theta=5.0 M.override_config.moe_config.freeze_moe_router=false
    | M.override_config={rope_theta: 5.0} critic.model.override_config={rope_theta: 5.0}
T.device=cuda M.override_config.attn_implementation=flash_attention_2
    | M.attn_implementation=flash_attention_2
FS.full_determinism=true A.use_kl_loss=true | FS.full_determinism=true REF.fsdp_config.full_determinism=false
M.lora_rank=8 M.target_modules=[q_proj,v_proj] M.exclude_modules=v_proj | M.target_modules=[q_proj, v_proj]
    M.exclude_modules=[v_proj] M.without_adapters.lora_rank=0
M.lora_rank=8 M.target_modules=[] M.target_parameters=experts.down_proj
    | M.target_modules=[] M.target_parameters=[experts.down_proj]
M.lora.rank=8 M.lora.alpha=4 M.lora.target_modules=[q_proj]
    | M.lora_rank=8 M.lora_alpha=4 M.target_modules=[q_proj]
GAE M.lora_rank=32 M.lora_alpha=32 M.target_modules=all-linear M.exclude_modules=null critic.model.lora_rank=8
    | M.lora_rank=32 M.lora_alpha=32 M.target_modules=[all-linear] critic.model.lora_rank=8
R.name=sglang R.server={urls: [http://a:1, http://b:1], weights_folder: /tmp, request_timeout: 60.0}
    | R.server.urls=['http://a:1', 'http://b:1'] R.server.request_timeout=60.0 R.server.weights_folder=/tmp
R.name=vllm R.mode=server R.server.request_timeout=60.0 | R.server.urls=[]
R.name=vllm R.mode=server R.server={urls: [http://a:1, http://b:1], weights_backend: gloo}
    | R.server.weights_backend=gloo
R.name=tgi R.server.urls=http://a:1 VAL T.val_only=true | R.name=tgi
generate: rollout.name=openai rollout.server.urls=http://a:1 | rollout.server.urls=['http://a:1']
R.name=sglang R.server.urls=[http://a:1] R.server.weights_folder=/tmp R.tensor_model_parallel_size=4
    | R.split=1
R.name=vllm R.mode=server R.server.urls=[http://a:1] R.tensor_model_parallel_size=4 | R.split=1
T.backend=ray | T.resolved_backend=ray
T.backend=local | T.resolved_backend=local
Q={a: [1]} | T.resolved_backend=local
Q={a: [1], r: [1]} P={reward: r} | T.resolved_backend=ray
T.n_gpus_per_node=4 T.nnodes=2 | T.pools={global_pool: [4, 4]}
sft: T.seed=5 | D.train_batch_size=256 D.max_length=1024 D.seed=5 optim.lr=0.00001
    T.total_epochs=1 train_batching.max_tokens=16384 T.resolved_backend=local
sft: D.max_length=100 max_token_len_per_gpu=199 | train_batching.max_tokens=199
sft: fsdp_config.use_torch_compile=true model.lora_rank=4
    | fsdp_config.use_torch_compile=true model.lora_rank=4
rm: T.seed=5 | D.chosen_key=chosen D.rejected_key=rejected D.margin_key=null D.seed=5
    center_rewards_coefficient=0 optim.lr=0.00001 T.pools={global_pool: [1]}
sft: T.backend=ray | T.resolved_backend=ray T.pools={global_pool: [1]}
rm: T.n_gpus_per_node=2 T.nnodes=3 | T.resolved_backend=ray T.pools={global_pool: [2, 2, 2]}
GAE A.use_kl_loss=true FS.use_torch_compile=true | COMPILED actor ref
GAE A.use_kl_loss=true FS.use_torch_compile=true REF.fsdp_config.use_torch_compile=false | COMPILED actor
GAE A.use_kl_loss=true critic.fsdp_config.use_torch_compile=true | COMPILED critic
GAE A.use_kl_loss=true A.use_torch_compile=true | COMPILED actor ref
GAE A.use_kl_loss=true A.use_torch_compile=true REF.use_torch_compile=false | COMPILED actor
GAE A.use_kl_loss=true critic.use_torch_compile=true | COMPILED critic
"""
"""COMPILED: the models that are compiled, and no others."""

EVEN = """
8 12 2 6 3 | A.fsdp_config={tensor_parallel_size: 2, pipeline_parallel_size: 2, fsdp_size: 2}
    A.ulysses_sequence_parallel_size=2 FS.pipeline_schedule=gpipe
    | FS.tensor_parallel_size=2 FS.pipeline_schedule=gpipe
8 12 2 6 3 | A.use_kl_loss=true REF.ulysses_sequence_parallel_size=4 | REF.ulysses_sequence_parallel_size=4
8 8 4 32 2 | R.name=native R.tensor_model_parallel_size=4 | R.split=4
8 8 4 32 2 | R.name=vllm R.tensor_model_parallel_size=4 | R.split=4
4 8 2 32 2 | R.name=vllm R.tensor_model_parallel_size=4 | R.split=4
"""
"""Devices; heads, heads of keys and values, width and layers of a model that the devices can share."""
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")


def test_defaults(loaded):
    loaded("", DEFAULTS)


@pytest.mark.parametrize(("given", "values"), rows(INHERITED))
def test_a_key_that_is_unset_or_null_takes_the_value_it_inherits(loaded, given, values):
    loaded(given, values)
    loaded(f"{given} {values.partition('=')[0]}=null", values)


@pytest.mark.parametrize(("given", "values"), rows(VALUES))
def test_values(loaded, given, values):
    if values.startswith("COMPILED"):
        at = {"actor": "A", "ref": "REF", "critic": "critic"}
        compiled = {name: str(name in values.split()).lower() for name in at}
        values = " ".join(f"{at[name]}.fsdp_config.use_torch_compile={compiled[name]}" for name in at)
    loaded(given, values)


@pytest.mark.parametrize(("sizes", "given", "values"), rows(EVEN))
def test_a_model_that_devices_can_share(loaded, load, model, sizes, given, values):
    devices, *counts = map(int, sizes.split())
    (Path(model) / "config.json").write_text(json.dumps(dict(zip(SIZES, counts, strict=True))))
    loaded(f"trainer.n_gpus_per_node={devices} {given}", values)
    assert load(f"trainer.n_gpus_per_node={devices} {given}").notices == ()


def test_a_kl_estimator_goes_in_both_places(loaded):
    for kind in (*tables.KL_KINDS, "full", "my.module:kl", "my.module:kl+"):
        values = f"A.kl_loss_type={kind} algorithm.kl_penalty={kind}"
        loaded(f"A.use_kl_loss=true algorithm.use_kl_in_reward=true {values}", values)


def test_paths(load, train_file, model, tmp_path, monkeypatch):
    (tmp_path / "b.parquet").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("~/train.parquet", train_file):
        assert load(f"data.val_files={given}").config.data.val_files == (train_file,)
    both = (train_file, f"{tmp_path}/b.parquet")
    assert load(f"data.val_files=[{', '.join(both)}]").config.data.val_files == both
    assert load("R.stop=['</answer>', \"\\n\\n\"]").config.actor_rollout_ref.rollout.stop[1] == "\n\n"
    config = load("M.lora_rank=4").config
    assert config.actor_rollout_ref.model.tokenizer_path == config.critic.model.path == model
    assert config.actor_rollout_ref.model.without_adapters.path == model
    assert load("sft: ").config.model.tokenizer_path == model
    (tmp_path / "mine.py").touch()
    assert load(f"W.critic={tmp_path}/mine.py:Critic").config.trainer.worker_classes


def test_batching_follows_the_dynamic_switch_and_budgets_inherit_through_two_steps(load):
    def batchings(given):
        actor, rollout, ref, critic = (value_at(load(given).config, name) for name in (
            "actor_rollout_ref.actor.train_batching", "actor_rollout_ref.rollout.log_prob_batching",
            "actor_rollout_ref.ref.log_prob_batching", "critic.forward_batching",
        ))  # fmt: skip
        return actor, rollout, ref, critic, load(given).config.critic.train_batching

    micro = "A.ppo_micro_batch_size_per_gpu=4"
    assert batchings(micro) == (Batching(max_samples=4), *[Batching()] * 4)
    tokens = [Batching(max_tokens=count) for count in (16384, 16384, 16384, 32768, 32768)]
    assert batchings(f"{micro} A.use_dynamic_bsz=true") == tuple(tokens)
    given = "A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=2000 critic.ppo_max_token_len_per_gpu=3000"
    tokens = [Batching(max_tokens=count) for count in (2000, 2000, 2000, 3000, 3000)]
    assert batchings(given) == tuple(tokens)


def test_sections_built_on_their_own_hold_the_same_values_as_loaded_ones(load, model):
    config = load().config
    assert ActorConfig() == config.actor_rollout_ref.actor
    assert RolloutConfig() == config.actor_rollout_ref.rollout
    assert ModelConfig(path=model) == config.actor_rollout_ref.model
    assert CriticConfig(model=CriticModelConfig(path=model), optim=config.critic.optim) == config.critic
    assert ActorConfig(clip_ratio=0.1).clip_ratio_high == 0.1


@pytest.mark.parametrize("root", [TrainConfig, SFTConfig, RMConfig])
def test_every_key_says_what_it_means_and_inherits_from_a_key(root):
    for key in keys(root).values():
        assert key.info.description, key.name
        assert key.inherits is None or key.inherits in keys(root), key.name


def test_a_command_line_of_verls(load):
    loaded = load(
        "C.rollout_is=token C.rollout_is_threshold=0.5_5.0 C.rollout_is_batch_normalize=true",
        "C.rollout_rs=token_k1, seq_max_k2,seq_mean_k1,token_k1 C.rollout_rs_threshold=0.5_2.0,0.01,1.001",
        "R.calculate_log_probs=true",
    )
    correction = loaded.config.algorithm.rollout_correction
    assert correction.corrects
    assert correction.weight_bounds == Bounds(0.5, 5.0)
    assert correction.rollout_rs == ("token_k1", "seq_max_k2", "seq_mean_k1")
    one, two, three = correction.rejection_bounds
    assert (one, two) == (Bounds(math.log(0.5), math.log(2)), Bounds(None, 0.01))
    assert (three.lower, three.upper) == pytest.approx((-math.log(1.001), math.log(1.001)))
    (notice,) = loaded.notices
    assert "calculate_log_probs: ignored" in notice


def test_the_yaml_of_a_config_loads_to_the_same(load, tmp_path):
    given = "C.rollout_is=sequence C.rollout_is_threshold=3 C.rollout_rs=[token_k2,token_k3]"
    config = load(f"{given} C.rollout_rs_threshold=0.1").config
    assert config.algorithm.rollout_correction.rollout_is_threshold == "3.0"
    (tmp_path / "again.yaml").write_text(to_yaml(to_dict(config)))
    assert load_train_config(str(tmp_path / "again.yaml")).config == config


def test_one_bound_serves_all_modes(load):
    assert load().config.algorithm.rollout_correction.weight_bounds == Bounds(None, 2.0)
    config = RolloutCorrectionConfig(rollout_rs="token_k2,token_k3", rollout_rs_threshold=0.3)
    assert config.rejection_bounds == (Bounds(None, 0.3), Bounds(None, 0.3))
    own = RolloutCorrectionConfig(rollout_rs="mine.py:far", rollout_rs_threshold="0.1_0.3")
    assert own.rejection_bounds == (Bounds(0.1, 0.3),)


def test_older_spellings(load, loaded):
    loaded("C.use_policy_gradient=true", "C.loss_type=reinforce")
    loaded("C.bypass_old_logprob_for_rollout=true", "C.bypass_mode=true")
    first = "algorithm.rollout_is_level=sequence algorithm.rollout_is_threshold=4.0"
    assert load(f"{first} algorithm.rollout_is=False").config == load(first).config == load().config


SHAPE = {
    "top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": -0.4, "min_tokens": 3,
}  # fmt: skip


def test_the_defaults_change_nothing(load):
    params = sampling(load().config, (2,))
    assert params == SamplingParams(max_tokens=params.max_tokens, stop_token_ids=(2,), seed=params.seed)
    assert not params.reshapes


@pytest.mark.parametrize("validation", [False, True])
def test_each_key_of_the_distribution_reaches_training_or_validation(load, validation):
    shape = (f"{'V' if validation else 'R'}.{name}={value}" for name, value in SHAPE.items())
    given = "V.do_sample=true V.temperature=0.6 R.temperature=0.9 VAL R.stop=[END] trainer.seed=5"
    config = load(given, *shape).config
    mine, other = (sampling(config, (2, 9), validation=which) for which in (validation, not validation))
    assert {name: getattr(mine, name) for name in SHAPE} == SHAPE
    assert not other.reshapes
    for params, temperature in ((mine, 0.6 if validation else 0.9), (other, 0.9 if validation else 0.6)):
        assert params.temperature == temperature
        assert (params.stop, params.stop_token_ids, params.seed) == (("END",), (2, 9), 5)


def test_greedy_validation_is_penalised_too(load):
    params = sampling(load("VAL V.repetition_penalty=1.3").config, (), validation=True)
    assert (params.temperature, params.repetition_penalty) == (0.0, 1.3)


def test_ignore_eos_leaves_the_stop_texts(load):
    config = load("R.ignore_eos=true R.stop=[END]").config
    for validation in (False, True):
        params = sampling(config, (2, 9), validation=validation)
        assert (params.stop_token_ids, params.stop) == ((), ("END",))


def test_the_modes_are_the_engines():
    field = RolloutConfig.model_fields["logprobs_mode"].annotation
    assert get_args(field) == get_args(LogprobsMode)
