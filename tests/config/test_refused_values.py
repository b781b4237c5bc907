"""What is refused of one value or of several: one error with its key, what was given and the remedy."""

import pytest

from tandem import hub
from tandem.config.tables import ADVANTAGE_ALIASES, ADVANTAGES
from tests.support.words import rows

VALUES = """
D.train_batch_sise=8 | unknown key // did you mean D.train_batch_size?
actor_rollout_ref.acotr.optim.lr=1e-6 | unknown key // did you mean A.optim.lr?
T.top_p=0.9 | unknown key // did you mean R.top_p?
zzz.qqq=1 | unknown key // `tandem config show`
trainer=5 | section, not a key // set the keys below it: T.<key>=…
T.total_epochs=many | wrong type // integer >= 1
T.seed=1.5 | wrong type // integer >= 0
T.seed=true | wrong type // integer >= 0
D.shuffle=1 | wrong type // true or false
A.clip_ratio={low: 1} | wrong type // got: {"low": 1} // number >= 0
D.train_batch_size=null | wrong type // integer >= 1
T.experiment_name=12 | text // T.experiment_name='"12"'
A.optim.lr=nan | out of range // number >= 0
A.optim.lr=.nan | out of range // got: NaN // number >= 0
A.optim.eps=-inf | out of range // number > 0
T.seed=NaN | out of range // integer >= 0
A.optim.betas=[0.9, nan] | out of range // got: [0.9, "nan"] // number >= 0 and < 1, as a list of 2
A.optim.betas=[0.9, 1.0] | out of range // number >= 0 and < 1, as a list of 2
A.optim.betas=[0.9] | wrong type // number >= 0 and < 1, as a list of 2
D.max_prompt_length=-1 | out of range // integer >= 1
R.temperature=0 | out of range // number > 0
R.top_p=1.5 | out of range // number > 0 and <= 1
A.clip_ratio=1.5 | 0 to 1 with L.loss_mode=vanilla // set A.clip_ratio_low=1
A.optim.lr_scheduler_type=nan | one of constant, linear, cosine, wsd // did you mean constant?
D.truncation=eror | one of error, left, right, middle // did you mean error?
G.adv_estimator=rlo | ESTIMATORS, or file.py:function // did you mean rloo?
A.loss_agg_mode=token-maen | one of token-mean, token-sum, seq-mean-token-sum, // did you mean token-mean?
L.loss_mode=vanila | one of bypass_mode, cispo, clip_cov, // did you mean vanilla?
G.use_kl_in_reward=true G.kl_penalty=low_var
    | one of kl, kl+, k1, k1+, abs, abs+, mse, mse+, k2, k2+, low_var_kl, // did you mean low_var_kl?
A.use_kl_loss=true A.kl_loss_type=k3++ | did you mean k3
G.use_kl_in_reward=true G.kl_penalty=/nowhere/no.py:kl | does not exist // got: /nowhere/no.py
T.logger=[console, wnadb] | got: ["console", "wnadb"] // did you mean wandb?
R.name=natve | one of native, hf, vllm, openai, sglang, tgi // did you mean native?
A.strategy=torchtitan | unknown value // one of fsdp2, fsdp
T.seed=${data.sead} | cannot be resolved: Interpolation key 'data.sead' not found
T.seed=${trainer.seed} | cannot be resolved: Recursive interpolation detected
T.logger=[console | cannot be read as YAML: while parsing a flow sequence // 'trainer.logger="…"'
D.train_batch_size=64 A.ppo_mini_batch_size=65
    | at most 64, and a divisor of it // set A.ppo_mini_batch_size=64, or raise D.train_batch_size
D.train_batch_size=128 A.ppo_mini_batch_size=48 | a divisor of 128 // A.ppo_mini_batch_size=32
critic.ppo_mini_batch_size=100 | a divisor of 1024 // critic.ppo_mini_batch_size=128
A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=1000
    | at least 1024 tokens (data.max_prompt_length + // set A.ppo_max_token_len_per_gpu=1024
R.log_prob_use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=1000
    | at: R.log_prob_max_token_len_per_gpu // at least 1024 tokens
    // set R.log_prob_max_token_len_per_gpu=1024
critic.use_dynamic_bsz=true critic.forward_max_token_len_per_gpu=9
    | at least 1024 tokens // set critic.forward_max_token_len_per_gpu=1024
SCORED RM.use_dynamic_bsz=true RM.forward_max_token_len_per_gpu=1023
    | at least 1024 tokens // set RM.forward_max_token_len_per_gpu=1024
rm: D.max_length=100 max_token_len_per_gpu=199 | set max_token_len_per_gpu=200
VAL V.do_sample=true | a V.temperature above 0 // set V.temperature=1.0, or V.do_sample=false
T.test_freq=5 | no validation files // set D.val_files, or remove this key
T.val_only=true | no validation files // set D.val_files, or remove this key
T.keep_best=val/accuracy | never validates // T.test_freq
T.resume_mode=resume_path | at: T.resume_from_path // missing // a checkpoint folder // set T.resume_mode=auto
T.resume_mode=path T.resume_from_path=/nowhere | does not exist // set T.resume_mode=auto
D.train_files=[/nowhere/a.parquet] | does not exist // got: /nowhere/a.parquet // check the path
custom_reward_function.path=/nowhere/r.py | does not exist // check the path
G.adv_estimator=/nowhere/mine.py:mine | does not exist // got: /nowhere/mine.py
M.path=Qwen/Qwen2.5-0.5B | a Hugging Face folder with config.json, or OWNER/NAME // HUB
critic.model.path=/ | has no config.json // a Hugging Face folder with config.json // OWNER/NAME
D.max_response_length=20 R.min_tokens=21 | at most D.max_response_length=20
D.max_response_length=20 VAL V.min_tokens=21 | at most D.max_response_length=20
R.logprobs_mode=processed_logits | needs log-probs, not logits // R.logprobs_mode=processed_logprobs
R.logprobs_mode=raw_logits | needs log-probs, not logits // R.logprobs_mode=processed_logprobs
R.temperature=0.7 R.logprobs_mode=raw_logprobs | ignore the temperature // R.logprobs_mode=processed_logprobs
"""

ALGORITHMS = """
G.adv_estimator=rloo | at: R.n // only one // got: 1 // >= 2 // set R.n=4, or use a different
G.adv_estimator=grpo_passk | at: R.n // only one // got: 1 // >= 2
G.adv_estimator=rloo R.n=4 R.n_schedule={9: 1} | only one // got: 9: 1 // raise it
G.adv_estimator=gdpo R.n=4 G.use_kl_in_reward=true | false // set A.use_kl_loss=true instead
G.adv_estimator=maxrl R.n=4 G.use_kl_in_reward=true | success rate // false // set A.use_kl_loss=true instead
GRPO G.adv_kwargs={epsilom: 1} | at: G.adv_kwargs.epsilom // one of epsilon // did you mean epsilon?
GRPO G.adv_kwargs={norm_adv_by_std_in_grpo: false} | at: G.adv_kwargs.norm_adv_by_std_in_grpo
    // set G.norm_adv_by_std_in_grpo instead
L.kwargs={tau: 1} | at: L.kwargs.tau // unknown option // no options
GRPO L.loss_mode=kl_cov L.kwargs={ppo_kl_coef: 1.0} | at: L.kwargs.ppo_kl_coef // set L.ppo_kl_coef
GRPO L.loss_mode=dro | at: L.dro_beta // missing
GRPO L.loss_mode=clip_cov L.clip_cov_ub=2.0 L.clip_cov_lb=2.0 | no covariance
GAE L.loss_mode=geo_mean | gae gives each token its own // gspo
G.adv_estimator=reinforce_plus_plus G.gamma=0.9 L.loss_mode=geo_mean | a discount or scores of single steps
G.adv_estimator=reinforce_plus_plus G.use_kl_in_reward=true L.loss_mode=geo_mean | a discount or scores of
GRPO L.loss_mode=vanilla A.clip_ratio_low=10 | never falls below 0 // set A.clip_ratio_low=1,
GRPO L.loss_mode=gspo A.clip_ratio_low=10 | never falls below 0 // set A.clip_ratio_low=1,
GRPO L.loss_mode=clip_cov A.clip_ratio_low=10 | never falls below 0 // set A.clip_ratio_low=1,
GRPO L.loss_mode=dppo_tv A.clip_ratio_low=10 | never falls below 0 // set A.clip_ratio_low=1,
G.adv_estimator=vtrace R.n=1 C.rollout_is=token |
C.rollout_is=tokens | did you mean token?
C.rollout_rs_threshold=2.0 C.rollout_rs=token_k4 | did you mean token_k
C.rollout_is=token C.rollout_is_threshold=5.0_0.5 | lower <= upper
C.rollout_is=token C.rollout_is_threshold=-1 | got: -1.0 // above 0
C.rollout_is=token C.rollout_is_threshold=high | above 0
C.rollout_is=token C.rollout_is_threshold=0.5_5 | got: 0.55 // reads 0.5_5 as 0.55
C.rollout_rs=token_k1 | at: C.rollout_rs_threshold // one bound, or 1
C.rollout_rs=token_k1,token_k2 C.rollout_rs_threshold='1,2,3' | or 2 separated
C.rollout_rs=token_k2 C.rollout_rs_threshold=0.5_2.0 | only an upper bound
C.rollout_rs=token_k1 C.rollout_rs_threshold=0.5 | lower <= upper
C.rollout_rs=[{}] | wrong type
C.bypass_mode=true C.rollout_is=token | C.loss_type=reinforce
C.bypass_mode=true C.loss_type=reinforce C.rollout_is=token C.rollout_is_batch_normalize=true | a forward pass
C.rollout_is=absent.py:weights | got: absent.py // does not exist
C.rollout_rs_threshold=1.0 C.rollout_rs=absent.py:far | got: absent.py // does not exist
L.loss_mode=bypass_mode | C.bypass_mode=true
C.bypass_mode=true L.loss_mode=mine.module:loss | its own policy loss
C.bypass_mode=true L.loss_mode=bypass_mode L.kwargs={loss_type: reinforce}
    | at: L.kwargs.loss_type // set C.loss_type instead
G.rollout_is_level=sequence G.rollout_is_threshold=4.0 G.rollout_is=True |
F.enable=true | got: true with 1 response per prompt // R.n=8
R.n=4 R.n_schedule={5: 1} F.enable=true | got: true with 1 response per prompt // R.n=8
R.n=4 F.enable=true G.use_kl_in_reward=true F.metric=seq_final_reward | F.metric=seq_reward
R.n=4 F.enable=true D.gen_batch_size=300 F.max_num_gen_batches=3 | never fill // got: 3 batches of 300 prompts
RM.overlong_buffer.enable=true | at: RM.overlong_buffer.len // missing // RM.overlong_buffer.len=102
RM.overlong_buffer.enable=true RM.overlong_buffer.len=513 | longer than // =102
RM.overlong_buffer={enable: true, len: 5} RM.overlong_buffer.penalty_factor=0 | out of range
R.ignore_eos=true G.mask_truncated_completions=true | got: true with R.ignore_eos=true // R.ignore_eos=false
R.n_schedule={0: 4} | out of range // got: 0: 4 // {1: 4, 100: 8}
R.n_schedule={3: 0} | out of range // got: 3: 0 // {1: 4, 100: 8}
D.sampler.class_path=mine.py | D.sampler.class_name
D.sampler.class_name=Mine D.sampler.class_path=mine.py | does not exist // check the path
A.adaptive_entropy.enabled=true A.adaptive_entropy.min_ent_coef=0.01 | raise the upper bound
A.adaptive_entropy.enabled=true A.entropy_coeff=0.1 | outside its bounds // A.entropy_coeff=0.0
G.use_kl_in_reward=true G.kl_ctrl.type=adaptive G.kl_ctrl.horizon=0 | integer > 0
A.use_kl_loss=true REF.reset_interval=-1 |
A.use_kl_loss=true M.lora_rank=4 REF.reset_interval=10 | got: 10 with M.lora_rank=4
M.gradient_checkpointing_mode=first | at: M.gradient_checkpointing_layers // missing // the number of layers
    // set M.gradient_checkpointing_layers, or M.gradient_checkpointing_mode=full
M.gradient_checkpointing_mode=every | at: M.gradient_checkpointing_layers // missing // one layer in every N
sft: model.gradient_checkpointing_mode=first | at: model.gradient_checkpointing_layers // missing
M.gradient_checkpointing_mode=every M.gradient_checkpointing_layers=1
    | >= 2 // set M.gradient_checkpointing_mode=full and remove this key
M.gradient_checkpointing_mode=first M.gradient_checkpointing_layers=0 | out of range // integer >= 1, or null
M.gradient_checkpointing_mode=ops M.gradient_checkpointing_ops=[]
    | got: nothing // at least one operator // set M.gradient_checkpointing_mode=full and remove this key
M.gradient_checkpointing_mode=ops M.gradient_checkpointing_ops=[matmul, atention]
    | got: atention // did you mean attention?
M.gradient_checkpointing_mode=some | unknown value // one of auto, full, first, every, ops
M.enable_activation_offload=true M.activation_offload_mode=asynch | one of async, sync // did you mean async?
M.lora_rank=8 M.target_modules=[all-linear,q_proj] | cannot be combined // got: ('all-linear', 'q_proj')
M.lora_rank=8 M.target_modules=[] | the list is empty // if M.target_parameters has names
M.lora_rank=8 M.lora_adapter_path=/nowhere | not a folder of adapters
M.lora_rank=-1 | out of range
M.lora_rank=8 M.lora_alpha=0 | out of range
"""

TOO_MANY_RESPONSES = """
R.n=1000000000000 | at most 9,765
R.n=9766 | at most 9,765
D.train_batch_size=8 A.ppo_mini_batch_size=8 R.n=2000000 | at most 1,250,000
R.n_schedule={1: 4, 9: 1000000} | got: 1000000 // at most 9,765
D.train_batch_size=1000000000 | at most 10,000,000
R.n=8 D.train_batch_size=5000000 | at most 1,250,000
F.enable=true R.n=2 D.gen_batch_size=90000000 | at most 5,000,000
VAL D.val_batch_size=90000000 | at most 10,000,000
V.do_sample=true V.temperature=1 VAL V.n=99999999 | at most 10,000,000
"""

WITHOUT_EFFECT = """
A.kl_loss_coef=0.01 | only if A.use_kl_loss=true
A.kl_loss_type=k2 | only if A.use_kl_loss=true
R.name=sglang R.server.urls=http://a:1 R.server.python=/a | only if R.server.urls is empty
R.name=sglang R.server.urls=http://a:1 R.server.arguments={a: 1} | got: {'a' // only if R.server.urls is empty
R.name=vllm R.mode=server R.server.urls=http://a:1 R.server.start_timeout=9 | only if R.server.urls is empty
G.kl_penalty=k2 | only if G.use_kl_in_reward=true
G.kl_ctrl.kl_coef=0.1 | only if G.use_kl_in_reward=true
G.use_kl_in_reward=true G.kl_ctrl.horizon=500 | only if G.kl_ctrl.type=adaptive
G.use_kl_in_reward=true G.kl_ctrl.target_kl=0.5 | only if G.kl_ctrl.type=adaptive
G.norm_adv_by_std_in_grpo=false | only if G.adv_estimator takes norm_adv_by_std_in_grpo
G.gdpo_reward_weights=[1, 2] | got: (1.0, 2.0) // only if G.adv_estimator takes gdpo_reward_weights
G.adv_estimator=grpo G.gdpo_reward_keys=[format] | got: ('format',) // has no effect
A.loss_scale_factor=100 | got: 100.0 // only if A.loss_agg_mode=seq-mean-token-sum-norm
custom_reward_function.name=mine | only if custom_reward_function.path is set
A.optim.min_lr_ratio=0.1 | only if A.optim.lr_scheduler_type=linear, cosine or wsd
A.optim.muon_momentum=0.9 | only if A.optim.optimizer=muon
critic.optim.lr_wsd_decay_ratio=0.2 | only if critic.optim.lr_scheduler_type=wsd
A.optim.lr_wsd_decay_style=linear | only if A.optim.lr_scheduler_type=wsd
critic.optim.total_training_steps=9 | only if critic.optim.lr_scheduler_type=linear, cosine or wsd,
    or if critic.optim.lr_warmup_steps_ratio is above 0
T.keep_best_mode=min | only if T.keep_best is set
T.resume_from_path=/tmp | only if T.resume_mode=resume_path
D.gen_batch_size=8 | only if F.enable=true
F.metric=score | only if F.enable=true
RM.overlong_buffer.log=true | only if RM.overlong_buffer.enable=true
A.adaptive_entropy.target_entropy=0.1 | only if A.adaptive_entropy.enabled=true
D.sampler.kwargs={floor: 0.1} | got: {'floor': 0.1} // only if D.sampler.class_name is set
D.sampler.class_name=PassRateSampler D.shuffle=false | has no effect
C.rollout_is_threshold=3.0 | only if C.rollout_is is set
C.rollout_rs_threshold=3.0 | only if C.rollout_rs is set
C.loss_type=reinforce | only if C.bypass_mode=true
C.bypass_mode=true C.loss_type=reinforce A.clip_ratio_c=4.0 | has no effect
A.use_kl_loss=true REF.reset_optimizer=true | has no effect
M.gradient_checkpointing_layers=4 | only if M.gradient_checkpointing_mode=first or every
M.gradient_checkpointing_mode=ops M.gradient_checkpointing_layers=4
    | only if M.gradient_checkpointing_mode=first or every
critic.model.gradient_checkpointing_layers=4 | only if critic.model.gradient_checkpointing_mode=first or every
M.gradient_checkpointing_ops=[matmul] | got: ('matmul',) // only if M.gradient_checkpointing_mode=ops
M.enable_gradient_checkpointing=false M.gradient_checkpointing_mode=ops
    | only if M.enable_gradient_checkpointing=true
M.activation_offload_mode=sync | only if M.enable_activation_offload=true
RM.model.enable_activation_offload=true | only if the model is trained
M.lora_alpha=32 | only if M.lora_rank is above 0
M.target_modules=[q_proj] | got: ('q_proj',) // only if M.lora_rank is above 0
M.exclude_modules=[q_proj] | got: ('q_proj',) // only if M.lora_rank is above 0
M.target_parameters=[down_proj] | got: ('down_proj',) // only if M.lora_rank is above 0
critic.model.lora_alpha=8 | only if critic.model.lora_rank is above 0
sft: model.lora_alpha=4 | only if model.lora_rank is above 0
RM.model.lora_rank=8 | has no effect
"""

ALONE = """
critic.ulysses_sequence_parallel_size=3 G.adv_estimator=grpoo
critic.fsdp_config.fsdp_size=3 G.adv_estimator=grpoo
V.do_sample=false V.n=none
REF.fsdp_config.fsdp_size=3 A.use_kl_loss=maybe
P.actor=global_pool P.rollout=nowhere
A.ppo_mini_batch_size=48 D.train_batch_size=lots
A.use_dynamic_bsz=perhaps
G.norm_adv_by_std_in_grpo=false R.n=4 G.adv_estimator=grop
R.log_prob_use_dynamic_bsz=true D.max_response_length=30000 A.ppo_max_token_len_per_gpu=0
"""
"""A wrong value, which rules about the others would read."""


@pytest.mark.parametrize(("given", "said"), [*rows(VALUES), *rows(ALGORITHMS), *rows(WITHOUT_EFFECT)])
def test_a_value_is_refused(refused, given, said):
    said = said.replace("ESTIMATORS", f"one of {', '.join([*ADVANTAGES, *ADVANTAGE_ALIASES])}")
    refused(given, said.replace("HUB", hub.remedy("Qwen/Qwen2.5-0.5B")))


@pytest.mark.parametrize(("given", "most"), rows(TOO_MANY_RESPONSES))
def test_more_responses_than_can_be_held_are_refused(refused, given, most):
    refused(f"algorithm.adv_estimator=grpo {given}", f"responses at once // {most}")


@pytest.mark.parametrize("given", rows(ALONE))
def test_a_wrong_value_is_reported_once_and_drags_no_others_along(refused, given):
    refused(given, "")
