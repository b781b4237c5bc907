"""The failure museum: faults that users of RL libraries reported, and the messages of a run about each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.support import broken
from tests.support.broken import Patch, changed, engine, prompts, requests, rollout

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
HF, KL = f"{ROLLOUT}.name=hf", f"{ACTOR}.use_kl_loss=true"
LORA = ("actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.name=hf", f"{ACTOR}.optim.lr=0.05")
UPDATES = f"{ACTOR}.ppo_mini_batch_size=2"


@dataclass(frozen=True)
class Fault:
    """A fault, where users met it, and the warning's name or a part of the error that a run has about it."""

    what: str
    met: str
    named: str
    put_in: Callable[[Patch], None]
    words: Sequence[str] = ()
    effect: int = 1
    symptom: bool = False


START, END = 3, 44
"""Tokens that stand for the beginning of a text and the end of a turn, which the vocabulary lacks."""

FAULTS = {
    "weights never sent": Fault(
        "the rollout keeps its first weights", "verl#3821", "is still that of version 0",
        engine(lambda first, newest: first), (HF,), effect=2,
    ),
    "weights damaged": Fault(
        "one number of one weight changes during the transfer", "slime, opt-in digests", "is damaged",
        engine(changed(broken.damage)), (HF,),
    ),
    "weights exchanged": Fault(
        "the weights of the gate and up projections are swapped", "vllm#52689",
        "model.layers.0.mlp.gate_proj.weight", engine(changed(broken.exchange)), (HF,),
    ),
    "old weights": Fault(
        "the rollout's weights are one update old, and no digest shows it", "open-instruct#1473", "stale",
        engine(lambda first, newest: first, version=0, honest=False), (HF,), effect=2,
    ),
    "something old left": Fault(
        "after an update the engine still uses old state, but reports the new version",
        "prime-rl, prefix cache", "leftover",
        engine(lambda first, newest: first, honest=False), (HF,), effect=2, symptom=True,
    ),
    "adapters never sent": Fault(
        "the rollout gets the base model without the adapters", "unsloth#8701, ms-swift#9855", "unadapted",
        broken.base_weights, LORA, effect=2,
    ),
    "encoded again": Fault(
        "the text is encoded again and gives different tokens", "verl#6501, TRL#5224, slime#2263",
        "retokenised", rollout(broken.reencoded),
    ),
    "top-p": Fault(
        "the engine cuts off tokens and returns probabilities over the remaining tokens", "TRL#6789",
        "reshaped", requests(lambda r: replace(r, params=replace(r.params, top_p=0.7))), (HF,),
    ),
    "temperature": Fault(
        "log-probs are computed before the temperature is applied", "vLLM's raw_logprobs", "unscaled",
        broken.raw_log_probs, (HF, f"{ROLLOUT}.temperature=0.7"),
    ),
    "log-probs late": Fault(
        "log-probs are shifted by one token", "off by one", "late", rollout(broken.late_log_probs), (HF,),
    ),
    "mask early": Fault(
        "the response mask starts at the last prompt token", "wrong mask by one", "early_mask",
        rollout(broken.early_mask), (UPDATES,),
    ),
    "mask late": Fault(
        "the response mask leaves out the first response token", "wrong mask by one", "late_mask",
        rollout(broken.late_mask),
    ),
    "prompt without its first token": Fault(
        "the engine drops the begin token that training sees", "double or missing begin token", "headless",
        requests(lambda r: replace(r, prompt_ids=r.prompt_ids[1:])), (HF,),
    ),
    "leak at the start": Fault(
        "packed sequences see each other", "transformers#46851", "packed", broken.leaking(at_once=True),
    ),
    "leak later": Fault(
        "packed sequences see each other for some shapes", "slime#1686", "leaked",
        broken.leaking(at_once=False),
    ),
    "dropout": Fault(
        "dropout stays on while log-probs are computed", "NeMo#2260", "unrepeatable",
        broken.dropout, effect=2,
    ),
    "numerics": Fault(
        "the engine computes with weights that are rounded to bf16", "TRL#4772", "numerics",
        engine(changed(broken.rounded), honest=False), (HF,), symptom=True,
    ),
    "loss scale": Fault(
        "each micro-batch is divided by its own tokens", "TRL#6024, ms-swift#10117, prime-rl#2358",
        "loss_scale", broken.own_counts, (f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",),
    ),
    "ratio": Fault(
        "old log-probs are recomputed before each update", "ratio always 1", "same_ratio", broken.fresh_old,
        (UPDATES,),
    ),
    "reference": Fault(
        "the reference shares the policy's weights", "KL always 0", "same_reference", broken.one_model, (KL,),
        effect=2,
    ),
    "KL": Fault("a sign in the KL estimate is wrong", "negative KL", "negative_kl", broken.turned_kl, (KL,),
        effect=2,
    ),
    "optimizer": Fault(
        "the optimizer updates parameters that are not the model's", "weights never move",
        "unmoved", broken.nothing_moves, effect=2,
    ),
    "learning rate": Fault(
        "the schedule gives a learning rate of zero", "nothing is learnt", "no_learning_rate", broken.no_rate,
    ),
    "groups": Fault(
        "a batch is reordered but its uids are not", "groups mixed up", "mixed_groups", rollout(broken.mixed),
    ),
    "scores": Fault(
        "scores are returned in a different order", "rewards of other samples",
        "foreign_scores", broken.other_scores,
    ),
    "rows twice": Fault("a sample is in the batch twice", "duplicated rows", "repeated",
        rollout(broken.repeated)),
    "sign": Fault("advantages have the wrong sign", "reward falls steadily", "opposed", broken.against,
        (f"{ROLLOUT}.n=6",),
    ),
    "end of turn": Fault(
        "the token that ends a turn is not one of the engine's stop tokens", "wrong eos", "run_on",
        prompts(lambda ids: ids, ends=frozenset({1, 13})),
    ),
    "two begins": Fault(
        "the chat template and the tokenizer both write a begin token", "double begin token", "two_begins",
        prompts(lambda ids: [START, START, *ids[-5:]], begin=START),
    ),
    "ended prompts": Fault(
        "prompts end with the end of a turn", "no generation prompt", "ended_prompts",
        prompts(lambda ids: [*ids[-6:], END], ends=frozenset({1, END})),
    ),
    "padded prompts": Fault(
        "prompts are padded on the left", "padding in prompts", "padded_prompts",
        prompts(lambda ids: [0, *ids[-6:]]),
    ),
    "lost prompts": Fault(
        "the saved position includes prompts that were read ahead but not used", "NeMo#3599, OpenRLHF#1322",
        "lost_prompts", broken.read_ahead, effect=3,
    ),
    "reward always zero": Fault(
        "the reward function never finds an answer", "verl#3407, AReaL#1426", "reward_constant",
        broken.nothing,
        symptom=True,
    ),
}  # fmt: skip
