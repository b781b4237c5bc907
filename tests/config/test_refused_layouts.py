"""What is refused of devices, pools, engines, kernels, and models by name, as in `test_refused_values.py`."""

import json
from pathlib import Path

import pytest

from tandem.models.attention_kernels import PACKAGES
from tests.support.words import full, rows

POOLS = """
POOLS APART P.refrence=b | got: refrence // did you mean ref?
A.use_kl_loss=true P={ref.old: global_pool} | at: P.ref.old // did you mean ref?
Q={train: [2], score: [1]} P={critic: scores} | at: P.critic // got: scores // did you mean score?
P.critic=b | one of global_pool // add it: Q.b=[…]
POOLS APART P.actor=b | cannot be combined with actor // remove P.actor
POOLS P={actor: a, critic: b, reward: c} | at: P.actor // got: a // set P.rollout too
POOLS P={rollout: a, critic: b, reward: c} | at: P.rollout // got: a // set P.actor too
POOLS P={critic: b} | at: Q.c // no role // got: [1] // P.<role>=c
POOLS P={critic: b} T.n_gpus_per_node=4 | at: Q.c // no role // got: [1] // P.<role>=c
Q={a: [1], reward_pool: [2]} P.reward=reward_pool | at: Q.reward_pool // another name
Q={a: [2, 0]} | out of range // got: {"a": [2, 0]} // mapping, each value: integer >= 1, or a list of them
Q={a: []} | the list is empty // got: {"a": []} // mapping, each value: integer >= 1, or a list of them
Q=[4] | wrong type // mapping, each value: integer >= 1, or a list of them
POOLS APART T.nnodes=2 T.n_gpus_per_node=2 | got: 2 per node × 2 nodes = 4
    // 3, the devices of all pools together // remove T.n_gpus_per_node and T.nnodes
T.n_gpus_per_node=2 T.backend=local | got: local, with 2 processes // set T.backend=auto
sft: T.nnodes=2 T.backend=local | got: local, with 2 processes
rm: T.nnodes=2 T.backend=local | got: local, with 2 processes
sft: T.n_gpus_per_node=2 T.cluster.address=nowhere | HOST:PORT
rm: T.n_gpus_per_node=2 T.cluster.address=nowhere | HOST:PORT
W.critc=mine.module:Critic | got: critc // did you mean critic?
W.critic=mine.py | not a reference to a class // file.py:Class or package.module:Class
W.critic=/nowhere/mine.py:Critic | does not exist // got: /nowhere/mine.py // check the path before the colon
W={actor_rollout: 'm:A', rollout: 'm:B'} | at: W.rollout // remove W.rollout
Q={a: 1, b: 1} P={actor: a, rollout: b} W.actor_rollout=m:A | set W.actor or W.rollout
T.backend=ray T.cluster.address=node7 | `ray start --head`
T.backend=ray T.cluster.address=ray://node7:10001 | `ray start --head`
T.backend=ray T.cluster.master_port=70000 | out of range // integer >= 0 and <= 65535
T.backend=ray T.timeouts.answer=0 | out of range // number > 0
T.resource_pool.a=[2] | unknown key // did you mean T.resource_pools?
T.placment={critic: b} | at: T.placment.critic // unknown key // did you mean T.placement?
T.timeouts.strat=9 | unknown key // did you mean T.timeouts.start?
"""

MODELS = """
RM.enable=true | at: RM.model.path // missing // RM.enable=false
RM.enable=true RM.model.path=/nowhere | does not exist // a Hugging Face folder with config.json // OWNER/NAME
RM.enable=true RM.models={a: {path: '${M.path}'}} RM.model.path=${M.path} | move this model to RM.models
RM.enable=true RM.models={a: {path: /nowhere}} | at: RM.models.a.path // OWNER/NAME
RM.models={a: {path: /nowhere}} | got: {'a' // only if RM.enable=true
RM.enable=true RM.models={a/b: {path: '${M.path}'}} | at: RM.models.a/b // not a valid name
RM.enable=true RM.models={a: {path: '${M.path}', step_separator: x, normalize: true}}
    | at: RM.models.a.normalize // scores of single steps // remove it
RM.enable=true RM.models={a: {path: '${M.path}', step_score: min}}
    | at: RM.models.a.step_score // only if step_separator is set
custom_reward_function={path: my.rewards, name: right} RM.enable=true RM.models={right: {path: '${M.path}'}}
    | at: RM.models.right // the same name // a different name
SCORED reward.weight=0.5 reward.combine=my.rewards:least | weights have no effect // apply the weights in the
reward.weight=0.5 | only if RM.enable=true
A.use_kl_loss=true REF.models={old: {path: /nowhere}} | at: REF.models.old.path // OWNER/NAME
A.use_kl_loss=true REF={models: {a: {}, b: {}}, reset_interval: 5}
    | at: REF.reset_interval // expected: 0 // set it to 0, or remove REF.models
A.use_kl_loss=true A.kl_loss_type=full REF.models={a: {}, b: {}} | got: a, b
    // an estimator such as k3+ instead of full // change G.kl_penalty and A.kl_loss_type
"""

ENGINES = """
R.name=openai R.server.urls=http://a:1 | at: R.name // got: openai // tandem generate
R.name=tgi R.server.urls=http://a:1 | at: R.name // got: tgi // tandem generate
SERVED R.server.urls=a:8000 |
SERVED R.logprobs_mode=raw_logprobs |
R.server.urls=http://a:1 | got: ('http://a:1',) // has no effect
R.name=vllm R.mode=server R.server.urls=a:1 |
R.name=vllm R.server.urls=http://a:1 | got: ('http://a:1',) // has no effect // R.mode=server
generate: rollout.name=tgi | at: rollout.server.urls // missing
R.tensor_model_parallel_size=2 | got: 2, with 1 devices // a divisor of 1 // or change the number of devices
R.name=hf T.n_gpus_per_node=2 R.tensor_model_parallel_size=2
    | expected: 1 // set R.tensor_model_parallel_size=1, or R.name=native
R.name=vllm T.n_gpus_per_node=6 R.tensor_model_parallel_size=4 | got: 4, with 6 devices
R.name=vllm R.mode=server T.n_gpus_per_node=2 R.tensor_model_parallel_size=2 | R.mode=colocate
generate: rollout.name=vllm rollout.tensor_model_parallel_size=2 |
T.n_gpus_per_node=2 REF.fsdp_config.use_torch_compile=false FS.tensor_parallel_size=2
    FS.use_torch_compile=true | got: true with FS.tensor_parallel_size=2
    // set FS.use_torch_compile=false, or FS.tensor_parallel_size=1
critic.model.use_liger=true critic.fsdp_config.use_torch_compile=true
    | got: true with critic.model.use_liger=true // set one of the two to false
sft: model.use_liger=true fsdp_config.use_torch_compile=true |
M.use_fused_kernels=true M.fused_kernel_options.impl_backend=liger FS.full_determinism=true
    | got: true with M.fused_kernel_options.impl_backend=liger
    // set M.fused_kernel_options.impl_backend=auto, or FS.full_determinism=false
critic.model.use_liger=true critic.fsdp_config.full_determinism=true
    | got: true with critic.model.use_liger=true
    // set critic.model.use_liger=false, or critic.fsdp_config.full_determinism=false
critic.model.use_liger=true critic.fsdp_config.dtype=fp64 | got: fp64 with critic.model.use_liger=true
    // set critic.model.use_liger=false, or critic.fsdp_config.dtype=fp32
FS.wrap_policy.min_num_params=-1 | integer >= 0
FS.full_determinism=perhaps |
FS.wrap_policy.min_num_parameters=3 | FS.wrap_policy.min_num_params
T.device=cpu M.use_fused_kernels=true M.fused_kernel_options.impl_backend=triton
    | set M.fused_kernel_options.impl_backend=auto, or T.device=cuda
T.device=cpu M.use_fused_kernels=true M.fused_kernel_options.impl_backend=liger
    | set M.fused_kernel_options.impl_backend=auto, or T.device=cuda
sft: T.device=cpu model.use_fused_kernels=true model.fused_kernel_options.impl_backend=triton |
T.device=cpu M.use_liger=true | CUDA
T.device=cpu critic.model.use_liger=true | CUDA
T.device=cpu SCORED RM.model.use_liger=true | CUDA
sft: T.device=cpu model.use_liger=true | CUDA
T.device=cpu M.attn_implementation=flash_attention_3
    | got: flash_attention_3 with T.device=cpu // set M.attn_implementation=auto, or T.device=cuda
T.device=cpu critic.model.attn_implementation=flash_attention_3 | got: flash_attention_3 with T.device=cpu
    // set critic.model.attn_implementation=auto, or T.device=cuda
M.attn_implementation=flash_attention_5 | one of auto, torch, KERNELS, sdpa
T.n_gpus_per_node=4 A.ulysses_sequence_parallel_size=3
    | got: 3, with 4 devices // a divisor of 4 // set A.ulysses_sequence_parallel_size=1, or change the number
T.n_gpus_per_node=4 FS.fsdp_size=3 | got: 3, with 4 devices // a divisor of 4
    // set FS.fsdp_size=-1, or change the number of devices
T.n_gpus_per_node=2 FS.pipeline_parallel_size=2 M.enable_activation_offload=true
    | got: true with FS.pipeline_parallel_size=2
T.n_gpus_per_node=2 FS.pipeline_parallel_size=2 M.lora_rank=8 | got: 8 with FS.pipeline_parallel_size=2
A.use_kl_loss=true A.kl_loss_type=full T.n_gpus_per_node=2 FS.pipeline_parallel_size=2
    | got: 2 with A.kl_loss_type=full // use an estimator such as A.kl_loss_type=k3+
A.use_kl_loss=true A.kl_loss_type=full T.n_gpus_per_node=2 REF.fsdp_config.pipeline_parallel_size=2
    | got: 2 with A.kl_loss_type=full // set REF.fsdp_config.pipeline_parallel_size=1
A.use_kl_loss=true G.use_kl_in_reward=true G.kl_penalty=full T.n_gpus_per_node=2
    FS.pipeline_parallel_size=2 | got: 2 with G.kl_penalty=full
A.use_kl_loss=true G.use_kl_in_reward=true G.kl_penalty=full T.n_gpus_per_node=2
    REF.fsdp_config.pipeline_parallel_size=2 | got: 2 with G.kl_penalty=full
"""

UNEVEN = """
8 12 2 6 3 | T=3 | got: 3, with 8 devices
8 12 2 6 3 | T=4 | got: 4 devices, num_key_value_heads 2, intermediate_size 6 in
8 12 2 6 3 | T=2 U=4 | got: 4 devices, 6 heads
8 12 2 6 3 | U=8 | got: 8 devices, 12 heads
8 12 2 6 3 | S=3 | got: 3, with 8 devices
8 12 2 6 3 | S=4 | got: 4 stages, num_hidden_layers 3 in
8 12 2 6 3 | S=2 T=3 | got: 3, with 4 devices
8 12 2 6 3 | S=2 FS.fsdp_size=8 | got: 8, with 4 devices
8 12 2 6 3 | T=2 FS.fsdp_size=8 | got: 8, with 4 devices
8 12 2 6 3 | A.use_kl_loss=true REF.ulysses_sequence_parallel_size=8 | got: 8 devices, 12 heads in
4 8 2 32 2 | R.name=native R.tensor_model_parallel_size=4 | got: 4 devices, num_key_value_heads 2 in
4 6 3 32 2 | R.name=vllm R.tensor_model_parallel_size=4
    | got: 4 devices, num_attention_heads 6, num_key_value_heads 3 in
8 12 2 6 3 qwen3_moe 6 | E=3 | got: 3, with 8 devices
8 12 2 6 3 qwen3_moe 6 | E=4 | got: 4 devices, num_experts 6 in
8 12 2 6 3 qwen3_moe 8 | T=2 E=8 | got: 8, with 4 devices
8 12 2 6 3 qwen3_moe 8 | FS.fsdp_size=2 E=4 | got: 4, with 2 devices
8 12 2 6 3 qwen3 | E=2 | got: 2 devices, no experts in // 1, or a model with experts // set E=1
8 12 2 6 4 gpt2 | T=2 | got: 2, model_type gpt2 in // granite, // set T=1
8 12 2 6 4 granite | S=2 | got: 2, model_type granite in // gpt_oss, // set S=1
"""
"""Devices; a model's heads, heads of keys and values, width, layers and type; words with names of `RANKS`."""
RANKS = {
    "T=": "A.fsdp_config.tensor_parallel_size=", "U=": "A.ulysses_sequence_parallel_size=",
    "S=": "A.fsdp_config.pipeline_parallel_size=", "E=": "A.fsdp_config.expert_parallel_size=",
}  # fmt: skip
SIZES = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers", "model_type"),
    "num_experts",
)


@pytest.mark.parametrize(("given", "said"), [*rows(POOLS), *rows(MODELS), *rows(ENGINES)])
def test_a_layout_is_refused(refused, given, said):
    served = "R.name=sglang R.server.urls=[http://a:1,http://b:1] R.server.weights_folder=/tmp/weights"
    refused(given.replace("SERVED", served), said.replace("KERNELS", ", ".join(PACKAGES)))


@pytest.mark.parametrize(("sizes", "given", "said"), rows(UNEVEN))
def test_a_model_that_devices_cannot_share_is_refused(refused, model, sizes, given, said):
    devices, *stored = (int(word) if word.isdigit() else word for word in sizes.split())
    (Path(model) / "config.json").write_text(json.dumps(dict(zip(SIZES, stored, strict=False))))
    for name, key in RANKS.items():
        given, said = given.replace(name, key), said.replace(f"set {name}", f"set {key}")
    refused(f"trainer.n_gpus_per_node={devices} {given}", full(said))
