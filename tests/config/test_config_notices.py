"""What is said of words that are superseded, deprecated or without effect; words of which nothing is said."""

import pytest

from tests.support.words import full, rows

NOTICES = """
A.use_dynamic_bsz=true A.ppo_micro_batch_size_per_gpu=4
    | A.ppo_micro_batch_size_per_gpu only if A.use_dynamic_bsz=false
A.ppo_max_token_len_per_gpu=9 | A.ppo_max_token_len_per_gpu only if A.use_dynamic_bsz=true
GRPO critic.optim.lr=1e-4 critic.ppo_epochs=2 | critic.optim.lr, critic.ppo_epochs only if G.adv_estimator
REF.fsdp_config.param_offload=true
    | REF.fsdp_config.param_offload only if A.use_kl_loss=true or G.use_kl_in_reward=true
A.use_kl_loss=true REF.fsdp_config.param_offload=true M.lora_rank=8 | REF.fsdp_config.param_offload only if
A.use_kl_loss=true M.lora_rank=8 Q={a: [1], b: [1]} P={actor_rollout: a, ref: b}
    | M.lora_rank: the reference policy runs in a different place
REF.reset_interval=100 | REF.reset_interval only if
VAL V.temperature=0.7 | V.temperature only if V.do_sample=true (otherwise validation is greedy)
VAL V.min_p=0.1 V.presence_penalty=0.1 | V.min_p only if V.do_sample=true (otherwise validation is greedy)
VAL V.n=4 | V.n=4: greedy responses to one prompt are all identical
D.val_batch_size=4 V.temperature=0.7 | V.temperature, D.val_batch_size only if D.val_files is set
R.min_tokens=3 R.ignore_eos=true | R.min_tokens only if R.ignore_eos=false, or if R.stop is set
G.adv_estimator=grpo | R.n=1: grpo compares the samples of a prompt, and there is only one
R.name=hf R.runner=module | R.runner only if R.name=native
A.optim.optimizer=adamw_8bit A.optim.fused=false | A.optim.fused only if A.optim.optimizer is not adamw_8bit
critic.optim.optimizer=adamw_cpu critic.fsdp_config.optimizer_offload=true
    | critic.fsdp_config.optimizer_offload only if critic.optim.optimizer is not adamw_cpu
A.optim.warmup_style=cosine | A.optim.warmup_style is A.optim.lr_scheduler_type=cosine here.
M.fused_kernel_options.impl_backend=triton
    | M.fused_kernel_options.impl_backend only if M.use_fused_kernels=true
M.use_fused_kernels=true T.device=cpu | M.use_fused_kernels=true: no effect; on a CPU
RM.model.use_liger=true T.device=cpu | RM.model.use_liger only if RM.enable=true
REF.entropy_from_logits_with_chunking=True | REF.entropy_from_logits_with_chunking: ignored: the head always
A.entropy_checkpointing=false | A.entropy_checkpointing: ignored: the backward pass always
D.shuffle=false D.seed=4 | D.seed only if D.shuffle=true
A.calculate_sum_pi_squared=true | A.calculate_sum_pi_squared: ignored: it is computed whenever the advantage
GRPO POOLS P={actor_rollout: a, critic: b, ref: c, reward_model: c}
    | P.critic: no effect; this run has no critic // P.ref: no effect; this run has no reference policy
    // P.reward_model: no effect; this run has no reward model
W.ref=m:Ref W.batch=m:Batch | W.ref: no effect; this run has no reference policy
SCORED Q={a: 1, b: 1, c: 1} P={reward_model: b, reward: c} | P.reward: no effect; this run has no reward
RM.forward_micro_batch_size_per_gpu=4 | RM.forward_micro_batch_size_per_gpu only if RM.enable=true
T.timeouts.call=60 T.cluster.interface=eth0 | T.cluster.interface, T.timeouts.call only if the run has more
T.balance_batch=false T.backend=ray | T.balance_batch only if a pool has more than one process
T.backend=ray T.cluster.address=10.0.0.1:6379 T.cluster.object_store_gb=2
    | T.cluster.object_store_gb only if T.cluster.address=null
T.n_gpus_per_node=2 T.max_restarts=2 | T.max_restarts: without checkpoints, a restarted run starts over
sft: T.timeouts.call=5 T.balance_batch=false T.max_restarts=1
    | T.balance_batch only if // T.max_restarts, T.timeouts.call only if
rm: T.timeouts.call=5 T.balance_batch=false T.max_restarts=1
    | T.balance_batch only if // T.max_restarts, T.timeouts.call only if
R.name=sglang R.server.urls=[http://a:1] R.server.weights_folder=/tmp R.tensor_model_parallel_size=4
    | R.tensor_model_parallel_size=4: no effect
R.name=vllm R.mode=server R.server.urls=[http://a:1] R.tensor_model_parallel_size=4
    | R.tensor_model_parallel_size=4: no effect
FS.pipeline_schedule=gpipe | FS.pipeline_schedule only if FS.pipeline_parallel_size is 2 or more
GRPO L.loss_mode=kl_cov A.ppo_mini_batch_size=1024 | L.loss_mode=kl_cov: with one update per batch, its
M.lora.rank=8 M.lora.alpha=4 M.lora.target_modules=[q_proj]
    | M.lora.rank is M.lora_rank=8 here. // M.lora.alpha is // M.lora.target_modules is
T.device=cuda M.override_config.attn_implementation=flash_attention_2
    | M.override_config.attn_implementation is M.attn_implementation=flash_attention_2 here.
C.use_policy_gradient=true | C.use_policy_gradient is C.loss_type=reinforce here.
    // C.loss_type only if C.bypass_mode=true
RM.reward_manager=dapo RM.reward_kwargs.overlong_buffer_cfg={enable: true, len: 100}
    | RM.reward_kwargs.overlong_buffer_cfg.enable is RM.overlong_buffer.enable=True here.
    // RM.reward_kwargs.overlong_buffer_cfg.len is RM.overlong_buffer.len=100 here.
    // RM.reward_manager: ignored
C.bypass_old_logprob_for_rollout=true | C.bypass_old_logprob_for_rollout is C.bypass_mode=True here.
+trainer.seed=3 ++data.shuffle=false | +trainer.seed: the prefix + is not needed; the key is read as T.seed.
    // ++data.shuffle: the prefix ++ is not needed; the key is read as D.shuffle.
+trainer.seed=1 +trainer.nnodes=1 ++data.seed=2
    | the prefix + is not needed; 2 keys are read without it. // ++data.seed: the prefix ++ is not needed
hydra.run.dir=out hydra/job_logging=none +hydra.searchpath=[file://x]
    | ignored, because Tandem does not run Hydra: hydra.run.dir, hydra/job_logging, hydra.searchpath
A.ppo_epochs=2 A.ppo_epochs=4 | A.ppo_epochs is given more than once on the command line; the last value
critic.grad_clip=0.5 | critic.grad_clip is critic.optim.clip_grad=0.5 here.
A.grad_clip=0.5 | A.grad_clip is A.optim.clip_grad=0.5 here.
T.ray_wait_register_center_timeout=8 T.n_gpus_per_node=2
    | T.ray_wait_register_center_timeout is T.timeouts.start=8 here.
SCORED RM.micro_batch_size_per_gpu=8
    | RM.micro_batch_size_per_gpu is RM.forward_micro_batch_size_per_gpu=8 here.
"""

SILENT = """
A.use_kl_loss=false A.kl_loss_coef=0.0 G.kl_ctrl.kl_coef=0.0 A.ppo_micro_batch_size=null A.optim.lr=0
A.kl_loss_coef=0.001 Q=null P=null M.use_fused_kernels=true C.bypass_mode=true A.clip_ratio=0.3
A.use_kl_loss=true A.kl_loss_coef=0.5 A.kl_loss_type=k2 REF.reset_interval=100 REF.reset_optimizer=true
G.use_kl_in_reward=true G.kl_penalty=abs G.kl_ctrl.kl_coef=0.2 REF.fsdp_config.param_offload=true
A.use_kl_loss=true G.use_kl_in_reward=true R.min_tokens=3 R.ignore_eos=true R.stop=[END]
A.use_kl_loss=true FS.pipeline_parallel_size=2 T.n_gpus_per_node=2
A.use_kl_loss=true REF.fsdp_config.pipeline_parallel_size=2 T.nnodes=2 M.enable_activation_offload=true
G.mask_truncated_completions=true R.ignore_eos=true R.stop=end
A.use_kl_loss=true REF.fsdp_config.param_offload=true
GRPO G.norm_adv_by_std_in_grpo=false R.n_schedule={1: 4, 100: 8}
G.adv_estimator=gdpo R.n=4 G.gdpo_reward_weights=[1, 0.5] A.use_kl_loss=true
G.adv_estimator=maxrl R.n=4 A.use_kl_loss=true RM.overlong_buffer={enable: true, len: 512, log: true}
G.adv_estimator=grpo_vectorized R.n=4 G.norm_adv_by_std_in_grpo=false
G.adv_estimator=vtrace G.gamma=0.9 G.adv_kwargs={rho_bar: 2}
G.adv_estimator=my_package.module:estimator G.adv_kwargs={anything: 1}
GAE C.rollout_is=token D.sampler.class_name=PassRateSampler D.sampler.kwargs={floor: 0.1}
C.bypass_mode=true L.loss_mode=bypass_mode
G.adv_estimator=reinforce_plus_plus L.loss_mode=geo_mean A.loss_agg_mode=seq-mean-token-mean
GRPO L.loss_mode=geo_mean A.loss_agg_mode=seq-mean-token-mean
GAE L.loss_mode=gspo A.loss_agg_mode=seq-mean-token-mean
GRPO L.loss_mode=kl_cov A.ppo_mini_batch_size=256
A.optim.lr_scheduler_type=cosine A.optim.min_lr_ratio=0.1 critic.model.enable_activation_offload=true
A.optim.lr_scheduler_type=wsd A.optim.lr_wsd_decay_style=linear R.logprobs_mode=raw_logprobs R.top_p=0.9
A.optim.optimizer=muon A.optim.muon_momentum=0.9 A.optim.no_weight_decay=[]
A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=1024 R.logprobs_mode=processed_logprobs R.temperature=0.7
critic.optim.optimizer=AdamW critic.optim.fused=false critic.optim.no_weight_decay=bias
critic.loss_agg_mode=seq-mean-token-sum-norm A.loss_scale_factor=100
M.use_fused_kernels=true M.fused_kernel_options.impl_backend=torch M.gradient_checkpointing_mode=ops
T.device=cuda M.use_liger=true SCORED RM.model.use_liger=true M.attn_implementation=flash_attention_3
T.device=cuda critic.model.use_liger=true
T.device=cpu critic.model.attn_implementation=torch
M.gradient_checkpointing_mode=first M.gradient_checkpointing_layers=1
M.gradient_checkpointing_mode=every M.gradient_checkpointing_layers=2 M.enable_activation_offload=true
M.gradient_checkpointing_mode=ops M.gradient_checkpointing_ops=[attention, aten.mm]
M.enable_gradient_checkpointing=false M.enable_activation_offload=true M.activation_offload_mode=sync
sft: model.enable_activation_offload=true fsdp_config.use_torch_compile=true
GAE M.lora_rank=32 M.lora_alpha=32 M.target_modules=all-linear M.exclude_modules=null critic.model.lora_rank=8
R.n=4 F.enable=true D.gen_batch_size=1536 F.max_num_gen_batches=10 F.metric=acc
A.adaptive_entropy.enabled=true A.adaptive_entropy.delta_ent_coef=0.005 A.entropy_coeff=0.001
D.max_response_length=20 VAL R.min_tokens=20 V.min_tokens=20
POOLS APART T.n_gpus_per_node=3
Q={a: [4, 4]} T.n_gpus_per_node=4 T.nnodes=2 W={actor: 'pkg.module:Actor', data: 'pkg.module:Data'}
T.n_gpus_per_node=2 T.balance_batch=false T.timeouts.call=0.5
T.backend=ray T.cluster.address=auto T.cluster.namespace=mine T.max_restarts=1 T.save_freq=5
T.backend=ray T.cluster.address='[fd00::1]:6379'
T.backend=ray T.cluster.object_store_gb=0.5 T.cluster.temp_dir=/tmp/ray
sft: T.timeouts.call=5 T.balance_batch=false T.n_gpus_per_node=2
rm: T.timeouts.call=5 T.balance_batch=false T.n_gpus_per_node=2
"""


@pytest.mark.parametrize(("given", "said"), rows(NOTICES))
def test_a_notice_is_given(load, given, said):
    notices = load(given).notices
    starts = [full(text).replace(" only if", ": no effect; used only if") for text in said.split(" // ")]
    assert len(notices) == len(starts), notices
    assert [n for n, start in zip(notices, starts, strict=True) if not n.startswith(start)] == []


@pytest.mark.parametrize("given", rows(SILENT))
def test_right_words_pass_without_a_notice(load, given):
    assert load(given).notices == ()
