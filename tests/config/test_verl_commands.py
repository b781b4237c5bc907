"""Real command lines from verl's examples (main and 0.6.1), and one of GRPO in all its parts."""

import pytest

from docs.verl_commands import COMMANDS, REFUSED, counts, page, refused
from tandem.config.load import load_train_config
from tandem.config.schema import value_at
from tandem.errors import ConfigErrors
from tests.support.words import full

R = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / "model" / name).write_text("{}")
    (folder / "a.parquet").touch()
    (folder / "score.py").write_text("def compute_score(*a, **k): return 0.0\n")
    return folder


def replaced(word, here):
    name, _, value = word.partition("=")
    bare = name.lstrip("+")
    if bare in ("data.train_files", "data.val_files"):
        value = here / "a.parquet"
    elif bare.endswith((".model.path", "model_path")):
        value = here / "model"
    elif bare.endswith("custom_reward_function.path"):
        value = here / "score.py"
    elif bare.endswith("lora_adapter_path"):
        value = "null"
    return f"{name}={value}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_passes_or_is_refused_for_keys_that_are_listed(name, here):
    words = [replaced(word, here) for word in COMMANDS[name]]
    try:
        load_train_config(None, words)
        keys = set()
    except ConfigErrors as found:
        keys = {str(error.field) for error in found.errors}
    assert keys == refused(name)


def test_the_counts():
    assert counts() == {"text": (34, 34), "turns": (0, 6), "vision": (15, 17), "megatron": (8, 8)}
    assert sum(bool(refused(name)) for name in COMMANDS) == len(REFUSED)


def test_the_page_says_which_are_refused_and_why():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(REFUSED)
    for row in rows:
        _, script, names, why, _ = row.split("|")
        assert {name.strip("` ") for name in names.split(",")} == refused(script.strip("` "))
        assert why.strip()


COMMAND = """
algorithm.adv_estimator=grpo data.train_files={data} data.val_files={data} data.train_batch_size=16
data.max_prompt_length=1024 data.max_response_length=27648 data.filter_overlong_prompts=True
data.truncation='error' actor_rollout_ref.model.path={model} actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=30000 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=30000 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name={engine}
actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.n=16
actor_rollout_ref.rollout.temperature=0.6 actor_rollout_ref.rollout.top_k=1000000
actor_rollout_ref.rollout.top_p=1.0 algorithm.use_kl_in_reward=False trainer.critic_warmup=0
trainer.logger=["console","tensorboard"] trainer.project_name='verl_grpo_boba'
trainer.experiment_name='ds_7b_fsdp_sglang' trainer.n_gpus_per_node=1 trainer.nnodes=1
trainer.val_before_train=False trainer.save_freq=50 trainer.test_freq=-1 trainer.total_epochs=15000
"""


@pytest.fixture(params=["native", "hf", "sglang"])
def engine(request):
    return request.param


@pytest.fixture
def loaded(train_file, model, engine):
    return load_train_config(None, COMMAND.format(data=train_file, model=model, engine=engine).split())


def test_every_key_takes_its_value(loaded, train_file, model, engine):
    words = {"True": True, "False": False, '["console","tensorboard"]': ("console", "tensorboard")}
    for line in COMMAND.format(data=train_file, model=model, engine=engine).split():
        name, text = line.split("=")
        value = value_at(loaded.config, name)
        if name in ("data.train_files", "data.val_files"):
            assert value == (text,)
        elif isinstance(value, float | int) and not isinstance(value, bool):
            assert value == float(text), name
        else:
            assert value == words.get(text, text.strip("'")), name


def test_the_user_hears_only_of_superseded_sizes(loaded, engine):
    expected = [
        "A.ppo_micro_batch_size_per_gpu: no effect; used only if A.use_dynamic_bsz=false.",
        "REF.log_prob_micro_batch_size_per_gpu: no effect; used only if REF.log_prob_use_dynamic_bsz=false.",
        "R.log_prob_micro_batch_size_per_gpu: no effect; used only if R.log_prob_use_dynamic_bsz=false.",
        "R.gpu_memory_utilization: no effect; used only if R.name=native or vllm or sglang.",
    ]
    assert set(loaded.notices) == {full(text) for text in expected[: 4 if engine == "hf" else 3]}
