"""Faults that users of the field met, each put into a real run by changing the one piece that had it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.data.prompts import PromptDataset
from tandem.engines.rollout.base import SharedModule
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.train import fsdp, state
from tandem.engines.train.base import Counts
from tandem.engines.train.lora import Adapters
from tandem.engines.weight_sync import digest
from tandem.models import policy
from tandem.models.packing import Packing
from tandem.protocol import DataProto, Ragged
from tandem.trainer.prompts import Prompts
from tandem.workers.actor import ActorWorker
from tandem.workers.batch import BatchWorker
from tandem.workers.integrity import SpecialTokens
from tandem.workers.loss_terms import SampledKLTerm
from tandem.workers.losses import ActorLoss
from tandem.workers.reward import RewardWorker
from tandem.workers.rollout_part import RolloutPart

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
HF, KL = f"{ROLLOUT}.name=hf", f"{ACTOR}.use_kl_loss=true"
LORA = ("actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.name=hf", f"{ACTOR}.optim.lr=0.05")
UPDATES = f"{ACTOR}.ppo_mini_batch_size=2"

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A fault and what a run says of it.

    Attributes:
        what: the fault.
        met: where users met it.
        named: the name of the warning, or a piece of the error that ends the run.
        effect: the first step in which the fault can show.
        put_in: puts it in.
        words: of the run's config.
        symptom: whether only what it looks like is said, with a list of causes.
    """

    what: str
    met: str
    named: str
    put_in: Callable[[Patch], None]
    words: Sequence[str] = ()
    effect: int = 1
    symptom: bool = False


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a method by `change(method, self, *its arguments)`; what marks it as a worker's stays."""
    real = getattr(owner, name)

    @wraps(real)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return change(real, self, *args, **options)

    patch.setattr(owner, name, method)


def rollout(change: Callable[[DataProto], DataProto]) -> Callable[[Patch], None]:
    """Changes the batch of what the rollout wrote."""

    def put_in(patch: Patch) -> None:
        around(patch, RolloutPart, "batch", lambda real, self, *args: change(real(self, *args)))

    return put_in


def column(batch: DataProto, name: str, values: torch.Tensor) -> DataProto:
    batch.batch[name] = batch.ragged(name).with_values(values)
    return batch


def engine(
    weights: Callable[[Any, Any], Any], *, version: int | None = None, honest: bool = True
) -> Callable[[Patch], None]:
    """The engine loads other weights than it is given.

    Args:
        weights: of the first module that it was given and the newest, those that it takes.
        version: that it says they are; None: the newest.
        honest: whether its digest is of what it holds.
    """

    def put_in(patch: Patch) -> None:
        first: list[Any] = []

        def update(real: Any, self: HFEngine, source: SharedModule, newest: int) -> Any:
            first[:] = first or [copied(source.module)]
            taken = weights(first[0], source.module)
            held = real(self, SharedModule(taken), newest if version is None else version)
            return held if honest else digest(source.module.named_parameters())

        around(patch, HFEngine, "update_weights", update)

    return put_in


def copied(module: Any) -> Any:
    """A model of its own with the same weights."""
    made = AutoModelForCausalLM.from_config(module.config, dtype=module.dtype).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.copy_(dict(module.named_parameters())[name])
    return made


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Any, Any], Any]:
    """The newest weights, some of them changed."""

    def weights(first: Any, newest: Any) -> Any:
        module = copied(newest)
        with torch.no_grad():
            change(dict(module.named_parameters()))
        return module

    return weights


def damage(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.25


def exchange(weights: dict[str, torch.Tensor]) -> None:
    up, gate = (weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "gate"))
    kept = up.clone()
    up.copy_(gate)
    gate.copy_(kept)


def rounded(weights: dict[str, torch.Tensor]) -> None:
    for value in weights.values():
        value.copy_(value.to(torch.bfloat16))


def requests(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Changes what the engine reads of each request."""

    def put_in(patch: Patch) -> None:
        around(patch, HFEngine, "submit", lambda real, self, asked: real(self, list(map(change, asked))))

    return put_in


def raw_log_probs(patch: Patch) -> None:
    def made(real: Any, self: HFEngine, **options: Any) -> None:
        real(self, **{**options, "logprobs_mode": "raw_logprobs"})

    around(patch, HFEngine, "__init__", made)


def reencoded(batch: DataProto) -> DataProto:
    values = batch.ragged("tokens").values.clone()
    values[batch.ragged("tokens").offsets[1] - 1] += 1
    return column(batch, "tokens", values)


def late_log_probs(batch: DataProto) -> DataProto:
    sampled = batch.ragged("rollout_log_probs")
    moved = torch.where(batch.ragged("response_mask").values, sampled.values.roll(1), 0.0)
    return column(batch, "rollout_log_probs", moved)


def early_mask(batch: DataProto) -> DataProto:
    mask = batch.ragged("response_mask").values
    return column(batch, "response_mask", mask | (mask.roll(-1) & ~mask))


def late_mask(batch: DataProto) -> DataProto:
    mask = batch.ragged("response_mask").values
    return column(batch, "response_mask", mask & mask.roll(1))


def mixed(batch: DataProto) -> DataProto:
    uids = batch.non_tensor_batch["uid"]
    return DataProto(batch.batch, {**batch.non_tensor_batch, "uid": [*uids[1:], uids[0]]})


def repeated(batch: DataProto) -> DataProto:
    return batch[[0, 0, *range(2, len(batch))]]


def base_weights(patch: Patch) -> None:
    def merged(real: Any, self: Adapters, weight: torch.Tensor) -> torch.Tensor:
        layers, self._layers = self._layers, {}
        found = real(self, weight)
        self._layers = layers
        return found

    around(patch, Adapters, "merged", merged)


def leaking(at_once: bool) -> Callable[[Patch], None]:
    """Packed sequences see those before them, from the start or once samples have been written."""

    def put_in(patch: Patch) -> None:
        leaks: list[bool] = [at_once]
        real = policy.decode

        def decode(decoder: Any, inputs: Any) -> Any:
            if leaks[-1]:
                inputs = replace(inputs, packing=Packing([len(inputs.input_ids)], device=torch.device("cpu")))
            return real(decoder, inputs)

        patch.setattr(policy, "decode", decode)
        rollout(lambda batch: leaks.append(True) or batch)(patch)

    return put_in


def dropout(patch: Patch) -> None:
    """On once the model has been trained, as after a call of train() that nothing undoes."""
    trained: list[int] = []
    real = policy.decode

    def decode(decoder: Any, inputs: Any) -> Any:
        hidden = real(decoder, inputs)
        return torch.nn.functional.dropout(hidden, 0.1) if trained else hidden

    def step(real_step: Any, self: Any, *args: Any, **options: Any) -> Any:
        trained.append(1)
        return real_step(self, *args, **options)

    patch.setattr(policy, "decode", decode)
    around(patch, fsdp.FSDPEngine, "train_step", step)


def own_counts(patch: Patch) -> None:
    def loss(real: Any, self: Any, out: Any, columns: Any, offsets: Any, counts: Counts) -> Any:
        own = Counts(max(1, int(columns["response_mask"].sum())), max(1, len(offsets) - 1))
        return real(self, out, columns, offsets, own)

    around(patch, ActorLoss, "__call__", loss)


def fresh_old(patch: Patch) -> None:
    def loss(real: Any, self: Any, out: Any, columns: Any, offsets: Any, counts: Any) -> Any:
        return real(self, out, {**columns, "old_log_probs": out["log_probs"].detach()}, offsets, counts)

    around(patch, ActorLoss, "__call__", loss)


def one_model(patch: Patch) -> None:
    def add(real: Any, self: ActorWorker, role: Any, *args: Any) -> Any:
        return self.hold("ref", self.engines["actor"]) if role == "ref" else real(self, role, *args)

    around(patch, ActorWorker, "_add_engine", add)


def other_scores(patch: Patch) -> None:
    def scored(real: Any, self: RewardWorker, batch: DataProto) -> DataProto:
        return real(self, batch[[*range(1, len(batch)), 0]])

    around(patch, RewardWorker, "_scored", scored)


def against(patch: Patch) -> None:
    def advantages(real: Any, self: BatchWorker, batch: DataProto, kl_coef: float) -> DataProto:
        found = real(self, batch, kl_coef)
        return column(found, "advantages", -found.ragged("advantages").values)

    around(patch, BatchWorker, "compute_advantages", advantages)


def prompts(change: Callable[[list[int]], list[int]], **special: Any) -> Callable[[Patch], None]:
    """Changes the token ids of all prompts.

    Args:
        special: what tokens are said to mean.
    """

    def put_in(patch: Patch) -> None:
        def batch(real: Any, self: PromptDataset, *args: Any, **options: Any) -> DataProto:
            found = real(self, *args, **options)
            rows = [change(row.tolist()) for row in found.ragged("prompts")]
            return DataProto({"prompts": Ragged.from_list(rows, torch.int64)}, found.non_tensor_batch)

        around(patch, PromptDataset, "batch", batch)
        if special:
            known = SpecialTokens.of
            patch.setattr(SpecialTokens, "of", lambda *args: replace(known(*args), **special))

    return put_in


def read_ahead(patch: Patch) -> None:
    def saved(real: Any, self: Prompts) -> dict[str, Any]:
        found = real(self)
        return {**found, "position": found["position"] + self.batch_size}

    around(patch, Prompts, "state_dict", saved)


def turned_kl(patch: Patch) -> None:
    """The estimator r - 1 - log r with the sign of the logarithm turned round."""

    def term(real: Any, self: Any, given: Any) -> Any:
        kl_T = real(self, given)[0] + 2 * (given["ref_log_probs"] - given["log_probs"])
        return kl_T, {"kl": kl_T}

    around(patch, SampledKLTerm, "__call__", term)


def nothing_moves(patch: Patch) -> None:
    patch.setattr(state.TrainState, "step", lambda self, *args: None)


def no_rate(patch: Patch) -> None:
    patch.setattr(fsdp, "learning_rate", lambda optim, *args: 0.0)


def nothing(patch: Patch) -> None:
    """The fault is in the config."""


START, END = 3, 44
"""Tokens that stand for the beginning of a text and the end of a turn: the vocabulary has none of its own."""

FAULTS = {
    "weights never sent": Fault(
        "the rollout keeps its first weights",
        "verl#3821",
        "is still that of version 0",
        engine(lambda first, newest: first),
        (HF,),
        effect=2,
    ),
    "weights damaged": Fault(
        "one number of one weight changes on the way", "slime, opt-in digests", "is damaged",
        engine(changed(damage)), (HF,),
    ),
    "weights exchanged": Fault(
        "gate and up projection change places", "vllm#52689",
        "model.layers.0.mlp.gate_proj.weight", engine(changed(exchange)), (HF,),
    ),
    "old weights": Fault(
        "the rollout is an update behind, and no digest tells", "open-instruct#1473", "stale",
        engine(lambda first, newest: first, version=0, honest=False), (HF,), effect=2,
    ),
    "something old left": Fault(
        "after an update the engine computes with something of before it, and says it does not",
        "prime-rl, prefix cache", "leftover",
        engine(lambda first, newest: first, honest=False), (HF,), effect=2, symptom=True,
    ),
    "adapters never sent": Fault(
        "the rollout gets the base without its adapters", "unsloth#8701, ms-swift#9855", "unadapted",
        base_weights, LORA, effect=2,
    ),
    "encoded again": Fault(
        "text is encoded anew and gives other tokens", "verl#6501, TRL#5224, slime#2263", "retokenised",
        rollout(reencoded),
    ),
    "top-p": Fault(
        "the engine cuts tokens and returns the probabilities of the rest", "TRL#6789", "reshaped",
        requests(lambda r: replace(r, params=replace(r.params, top_p=0.7))), (HF,),
    ),
    "temperature": Fault(
        "log-probs are those before the temperature", "vLLM's raw_logprobs", "unscaled",
        raw_log_probs, (HF, f"{ROLLOUT}.temperature=0.7"),
    ),
    "log-probs late": Fault(
        "log-probs stand at the token behind theirs", "off by one", "late", rollout(late_log_probs), (HF,),
    ),
    "mask early": Fault(
        "the response mask begins at the last prompt token", "wrong mask by one", "early_mask",
        rollout(early_mask), (UPDATES,),
    ),
    "mask late": Fault(
        "the response mask leaves out the first response token", "wrong mask by one", "late_mask",
        rollout(late_mask),
    ),
    "prompt without its first token": Fault(
        "the engine drops the begin token that training sees", "double or missing begin token", "headless",
        requests(lambda r: replace(r, prompt_ids=r.prompt_ids[1:])), (HF,),
    ),
    "leak at the start": Fault(
        "packed sequences see each other", "transformers#46851", "packed", leaking(at_once=True),
    ),
    "leak later": Fault(
        "packed sequences see each other in some shapes", "slime#1686", "leaked", leaking(at_once=False),
    ),
    "dropout": Fault(
        "dropout stays on where log-probs are computed", "NeMo#2260", "unrepeatable", dropout, effect=2,
    ),
    "numerics": Fault(
        "the engine computes with weights rounded to bf16", "TRL#4772", "numerics",
        engine(changed(rounded), honest=False), (HF,), symptom=True,
    ),
    "loss scale": Fault(
        "each micro-batch is divided by its own tokens", "TRL#6024, ms-swift#10117, prime-rl#2358",
        "loss_scale", own_counts, (f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",),
    ),
    "ratio": Fault(
        "old log-probs are computed anew before each update", "ratio always 1", "same_ratio", fresh_old,
        (UPDATES,),
    ),
    "reference": Fault(
        "the reference shares the policy's weights", "KL always 0", "same_reference", one_model, (KL,),
        effect=2,
    ),
    "KL": Fault("the KL's estimate has a sign turned round", "negative KL", "negative_kl", turned_kl, (KL,),
        effect=2,
    ),
    "optimizer": Fault(
        "the optimizer holds other parameters than the model", "weights never move", "unmoved", nothing_moves,
        effect=2,
    ),
    "learning rate": Fault(
        "the schedule gives a learning rate of zero", "nothing is learnt", "no_learning_rate", no_rate,
    ),
    "groups": Fault(
        "a batch is reordered and its uids are not", "groups mixed up", "mixed_groups", rollout(mixed),
    ),
    "scores": Fault(
        "scores come back in another order", "rewards of other samples", "foreign_scores", other_scores,
    ),
    "rows twice": Fault("a sample is in the batch twice", "duplicated rows", "repeated", rollout(repeated)),
    "sign": Fault("advantages have the wrong sign", "reward falls steadily", "opposed", against,
        (f"{ROLLOUT}.n=6",),
    ),
    "end of turn": Fault(
        "the token that ends a turn is none of the engine's stop tokens", "wrong eos", "run_on",
        prompts(lambda ids: ids, ends=frozenset({1, 13})),
    ),
    "two begins": Fault(
        "the chat template and the tokenizer both write a begin token", "double begin token", "two_begins",
        prompts(lambda ids: [START, START, *ids[-5:]], begin=START),
    ),
    "ended prompts": Fault(
        "prompts end like a finished turn", "no generation prompt", "ended_prompts",
        prompts(lambda ids: [*ids[-6:], END], ends=frozenset({1, END})),
    ),
    "padded prompts": Fault(
        "prompts are padded on the left", "padding in prompts", "padded_prompts",
        prompts(lambda ids: [0, *ids[-6:]]),
    ),
    "lost prompts": Fault(
        "the saved position is that of what was read ahead", "NeMo#3599, OpenRLHF#1322", "lost_prompts",
        read_ahead, effect=3,
    ),
    "reward always zero": Fault(
        "the reward function never finds an answer", "verl#3407, AReaL#1426", "reward_constant", nothing,
        symptom=True,
    ),
}  # fmt: skip
