"""Every key of verl's `ppo_trainer` has a verdict, and the verdict is true."""

import json
from pathlib import Path

import pytest
import yaml

from docs.verl_keys import OTHERS, VERL, page, verdict
from docs.verl_versions import TRAINERS, flat
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, value_at
from tandem.config.verl import DEFAULTS, KEPT, differing
from tandem.peers.table import former_names, rule_of
from tests.support.words import full, rows

PEER = Path(__file__).parents[2] / ".peers" / "verl"
OF_OTHERS = json.loads(OTHERS.read_text())
"""Keys of other versions, with the versions that have them and their last default."""
A = "actor_rollout_ref.actor"


def given(name, value):
    return f"{name}={json.dumps(value)}"


def differing_values(one, other):
    return {name for name in keys(TrainConfig) if value_at(one, name) != value_at(other, name)}


def words_of(text):
    return set(full(text).split())


def test_every_key_has_a_verdict():
    assert len(VERL) > 800
    assert [name for name in [*VERL, *OF_OTHERS] if verdict(name)[0] == "no verdict"] == []


def test_the_page_has_every_key():
    text = page()
    assert all(f"| `{name}` |" in text for name in VERL)
    assert all(f"| `{name}` | {', '.join(row['versions'])} |" in text for name, row in OF_OTHERS.items())
    assert text.count("| no verdict |") == 0


def test_keys_of_verls_lead_to_keys_or_have_a_reason():
    rules = {name: rule_of(name) for name in VERL if name not in keys(TrainConfig)}
    for name, rule in rules.items():
        for target in rule.now if rule is not None else ():
            assert target in keys(TrainConfig) or rule_of(target) is not None, (name, target)
        assert rule is None or rule.now or str(rule), name


def test_all_of_verls_defaults_are_understood(load):
    """The defaults of unsupported features are accepted, as in a file that contains every key."""
    ours = {"trainer.n_gpus_per_node", "trainer.logger", "trainer.device"}
    words = [
        given(name, value)
        for name, value in VERL.items()
        if name not in keys(TrainConfig) and name not in ours and "${" not in str(value) and value != "???"
    ]
    config, plain = load(*words).config, load().config
    assert differing_values(config, plain) == words_of("""
        A.fsdp_config.use_torch_compile REF.fsdp_config.use_torch_compile critic.fsdp_config.use_torch_compile
        critic.fsdp_config.dtype trainer.cluster.ray_init trainer.timeouts.collective trainer.seed data.seed
    """)  # fmt: skip


LISTED = ("0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")


@pytest.mark.parametrize("version", LISTED)
def test_the_defaults_of_other_versions_ask_for_nothing(load, version):
    words = [
        given(name, row["default"])
        for name, row in OF_OTHERS.items()
        if version in row["versions"] and "${" not in str(row["default"]) and not name.endswith("path")
    ]
    assert len(words) > 100
    config, plain = load(*words).config, load().config
    assert differing_values(config, plain) <= words_of("""
        A.fsdp_config.dtype REF.fsdp_config.dtype critic.fsdp_config.dtype
        critic.fsdp_config.use_torch_compile reward_model.fsdp_config.dtype
        reward_model.model.use_remove_padding R.update_weights_bucket_megabytes trainer.timeouts.collective
    """)  # fmt: skip


OTHER = {True: False, False: True}


@pytest.mark.slow
def test_results_do_not_depend_on_keys_with_nothing_to_act_on(load):
    """Such a key is dropped before anything reads the config, whatever its value is."""
    plain = load().config
    checked = 0
    for name, default in VERL.items():
        rule = rule_of(name)
        if verdict(name)[0] != "ignored" or rule.gate is not None:
            continue
        for value in rule.only or (default, OTHER.get(default, 7) if isinstance(default, bool) else 7):
            loaded = load(given(name, value))
            assert loaded.config == plain, name
            if value is not None:
                assert [reading.verdict for reading in loaded.readings] == ["ignored"], name
            checked += 1
    assert checked > 400


FEATURES = """
distillation.distillation_loss.topk=64 distillation.enabled=true
R.multi_turn.format=hermes R.multi_turn.enable=True
A.checkpoint.load_contents=[model] | got: ['model']
A.optim.lr_decay_style=cosine A.optim.min_lr=1e-7 | got: 1e-07
A.optim.lr_decay_style=WSD A.optim.lr_wsd_decay_style=exponential
A.optim.zero_indexed_step=false
A.optim.zero_indexed_step=1
R.over_sample_rate=0.1
R.multi_turn=true
M.lora.lora_B_init_method=xavier_uniform
T.v1.sampler.custom_sampler.path=mine.py
T.v1.sampler.sync_refill_failed_groups=true
reward.reward_model.rollout.quantization=fp8
reward.reward_model.rollout.dtype=float16
reward.reward_manager.name=batch
A.load_weight=false
A.megatron.override_mcore_model_config.moe_router_topk=2
A.megatron.override_transformer_config.moe_router_load_balancing_type=aux_loss
REF.megatron.override_transformer_config.moe_router_topk=2
R.dtype=float16
R.multi_turn.tool_config_path=tools.yaml
T.v1.trainer_mode=separate_async
D.image_patch_size=14 D.datagen.path=a.py
M.override_config.attention_dropout=0.1
M.override_config.model_config.max_position_embeddings=9
T.max_actor_ckpt_to_keep=3 T.max_critic_ckpt_to_keep=2 | contradicts T.max_actor_ckpt_to_keep
"""


@pytest.mark.parametrize(("given", "said"), rows(FEATURES))
def test_a_feature_that_is_not_offered_is_refused_once_at_its_switch(refused, given, said):
    refused(given, f"remedy: // {said}" if said else "remedy:")


def test_a_feature_that_is_off_asks_for_nothing(load):
    loaded = load("distillation.enabled=false distillation.distillation_loss.topk=64 R.multi_turn.format=x")
    assert loaded.config == load().config
    assert {reading.verdict for reading in loaded.readings} == {"ignored"}


OTHER_NAMES = """
critic.model.fsdp_config.param_offload=true | critic.fsdp_config.param_offload=true
critic.fsdp.optimizer_offload=true | critic.fsdp_config.optimizer_offload=true
critic.fsdp.ulysses_sequence_parallel_size=1 | critic.ulysses_sequence_parallel_size=1
FS.mixed_precision.param_dtype=bf16 | FS.dtype=bf16
FS.offload_policy=True | FS.param_offload=true FS.optimizer_offload=true
FS.offload_policy=False FS.param_offload=True | FS.param_offload=true
R.checkpoint_engine.update_weights_bucket_megabytes=64 | R.update_weights_bucket_megabytes=64
reward.sandbox_fusion.url=http://here sandbox_fusion.max_concurrent=8
    | reward.sandbox.url=http://here reward.sandbox.max_concurrent=8
RM.sandbox_fusion.memory_limit_mb=2048 | reward.sandbox.memory_limit_mb=2048
reward.custom_reward_function.name=score | custom_reward_function.name=score
T.max_actor_ckpt_to_keep=3 T.max_critic_ckpt_to_keep=3 | T.max_ckpt_to_keep=3
R.mode=async | R.mode=colocate
A.strategy=megatron model_engine=megatron | A.strategy=fsdp2
+ray_kwargs.ray_init.runtime_env.env_vars.A='1' ray_kwargs.ray_init.num_cpus=4
    | T.cluster.ray_init={runtime_env: {env_vars: {A: '1'}}, num_cpus: 4}
A.megatron.param_offload=True A.megatron.override_transformer_config.recompute_granularity=selective
    | FS.param_offload=true
T.n_gpus_per_node=2 A.megatron.tensor_model_parallel_size=2 A.megatron.pipeline_model_parallel_size=1
    | FS.tensor_parallel_size=2
R.seed=7 A.data_loader_seed=8 | T.seed=7 D.seed=7
A.data_loader_seed=8 A.shuffle=true | T.seed=8
M.override_config.moe_config.freeze_moe_router=true | M.mixture.freeze_router=true
A.megatron.override_transformer_config.moe_z_loss_coeff=0.01 | M.mixture.router_z_loss_coef=0.01
A.megatron.override_transformer_config.moe_aux_loss_coeff=0.1
    A.megatron.override_transformer_config.moe_router_load_balancing_type=seq_aux_loss
    | M.mixture.router_aux_loss_coef=0.1
critic.megatron.override_transformer_config.moe_router_bias_update_rate=0.001
    | critic.model.mixture.router_bias_update_rate=0.001
FS.seed=9 | T.seed=0
FS.seed=9 FS.full_determinism=true | T.seed=9
R.prompt_length=512 D.max_prompt_length=512 | D.max_prompt_length=512
actor_rollout_ref.nccl_timeout=77 | T.timeouts.collective=77.0
FS.model_dtype=bfloat16 | FS.model_dtype=bf16
"""


@pytest.mark.parametrize(("given", "values"), rows(OTHER_NAMES))
def test_other_names_and_values(loaded, given, values):
    loaded(given, values)


NOTHING = """
A.megatron.override_transformer_config.moe_z_loss_coeff=0.0 A.megatron.virtual_pipeline_model_parallel_size=2
reward.reward_model.enable=false RM.enable=false
"""


@pytest.mark.parametrize("given", rows(NOTHING))
def test_keys_that_ask_for_nothing(load, given):
    assert load(given).config == load().config


IDLE = """
A.optim.min_lr=1e-7 | A.optim.lr_decay_style=linear
A.optim.lr_wsd_decay_style=exponential | A.optim.lr_decay_style=WSD
F.max_inflight_gen_batches=2 | F.enable=true
RM.max_length=4096 | RM.enable=true
"""


@pytest.mark.parametrize(("given", "beside"), rows(IDLE))
def test_a_key_that_is_idle_beside_another_value_of_verls_says_so(load, errors, given, beside):
    loaded = load(given)
    assert loaded.config == load().config
    assert all("no effect while" in reading.sentence for reading in loaded.readings)
    assert full(given).partition("=")[0] in errors(given, beside)


def test_dapos_reward_manager_alone_has_an_overlong_penalty(load, loaded):
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg={enable: True, len: 8, penalty_factor: 0.5}"
    assert load(buffer).config == load(f"{buffer} reward_model.reward_manager=naive").config == load().config
    for manager in ("reward_model.reward_manager=dapo", "reward.reward_manager.name=dapo"):
        at = "reward_model.overlong_buffer"
        loaded(f"{buffer} {manager}", f"{at}.enable=true {at}.len=8 {at}.penalty_factor=0.5")


def test_what_does_nothing_is_worth_a_sentence_in_a_command_line_of_verls(load, errors):
    word = f"{A}.kl_loss_type=mse"
    assert errors(word).keys() == {f"{A}.kl_loss_type"}
    off = load(word, f"{A}.use_kl_loss=False")
    assert off.config == load(word, "data.return_raw_chat=True").config
    assert any(f"{A}.kl_loss_type: no effect" in notice for notice in off.notices)
    for of_verl in ("data.return_raw_chat=True", "trainer.defaults=verl"):
        loaded = load(word, of_verl, "trainer.n_gpus_per_node=1", "trainer.logger=console")
        assert any(f"{A}.kl_loss_type: no effect" in notice for notice in loaded.notices)


def test_defaults_of_verl(loaded):
    values = "A.optim.no_weight_decay=[] trainer.logger=[console, wandb] trainer.n_gpus_per_node=8"
    folder = "trainer.default_local_dir=checkpoints/verl_examples/mine"
    loaded("trainer.defaults=verl trainer.experiment_name=mine", f"{values} {folder}")
    loaded("trainer.defaults=verl trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node=2")


def test_other_defaults_are_said_where_keys_of_verl_are_given(load):
    assert load("trainer.seed=3").other_defaults is None
    said = load("data.return_raw_chat=True", "trainer.logger=console").other_defaults
    assert said == differing({"trainer.logger"})
    assert "trainer.n_gpus_per_node=1 (verl: 8)" in said and "trainer.logger" not in said
    assert load("data.return_raw_chat=True", "trainer.defaults=verl").other_defaults is None


def test_former_names_are_found_in_old_configs():
    assert "critic.grad_clip" in former_names("critic.optim.clip_grad")
    assert former_names("trainer.save_freq") == []


def _plain(value):
    names = {"AdamW": "adamw", "fsdp": "fsdp2", "all-linear": ["all-linear"]}
    value = names.get(value, value) if isinstance(value, str) else value
    return list(value) if isinstance(value, tuple) else value


def test_defaults_that_are_others_in_verl_are_listed():
    """Each key that both have has the same default, inherits what verl interpolates, or is listed."""
    listed = {*DEFAULTS, *KEPT}
    for name, value in VERL.items():
        if name not in keys(TrainConfig) or "${" in str(value) or name in listed:
            continue
        key = keys(TrainConfig)[name]
        if key.inherits is None and _plain(value) != _plain(key.default):
            assert (value, _plain(key.default)) in [(None, []), (None, False), (None, ""), (2.0, "2.0")], name


@pytest.mark.verl
def test_the_stored_keys_are_those_of_the_installed_version():
    (folder,) = PEER.glob("lib/python3*/site-packages/verl/trainer/config")
    first, second = (
        flat(yaml.safe_load((folder / f"_generated_{name}.yaml").read_text())) for name in TRAINERS
    )
    assert first == VERL
    found = {name: row["default"] for name, row in OF_OTHERS.items() if "0.9.1" in row["versions"]}
    assert {name: value for name, value in second.items() if name not in VERL} == found


def test_a_file_is_read_as_words_are(tmp_path, required):
    path = tmp_path / "verl.yaml"
    path.write_text("critic:\n  fsdp:\n    param_offload: true\n    wrap_policy: {min_num_params: 5}\n")
    fsdp = load_train_config(str(path), required).config.critic.fsdp_config
    assert fsdp.param_offload and fsdp.wrap_policy.min_num_params == 5
