"""Ways to put a fault into a real run; each changes the one piece of code that had the fault."""

from collections.abc import Callable
from dataclasses import replace
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
from tandem.watch.batches import SpecialTokens
from tandem.workers.actor import ActorWorker
from tandem.workers.batch import BatchWorker
from tandem.workers.loss_terms import SampledKLTerm
from tandem.workers.losses import ActorLoss
from tandem.workers.reward import RewardWorker
from tandem.workers.rollout_part import RolloutPart

Patch = pytest.MonkeyPatch


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    real = getattr(owner, name)

    @wraps(real)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return change(real, self, *args, **options)

    patch.setattr(owner, name, method)


def fault(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Return a decorator that makes a fault of a function that `around` takes."""
    return lambda change: lambda patch: around(patch, owner, name, change)


def rollout(change: Callable[[DataProto], DataProto]) -> Callable[[Patch], None]:
    return fault(RolloutPart, "batch")(lambda real, self, *args: change(real(self, *args)))


def column(batch: DataProto, name: str, values: torch.Tensor) -> DataProto:
    batch.batch[name] = batch.ragged(name).with_values(values)
    return batch


def engine(
    weights: Callable[[Any, Any], Any], *, version: int | None = None, honest: bool = True
) -> Callable[[Patch], None]:
    """Let the engine load `weights(first, newest)` and report `version` and, if `honest`, its digest."""

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
    made = AutoModelForCausalLM.from_config(module.config, dtype=module.dtype).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.copy_(dict(module.named_parameters())[name])
    return made


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Any, Any], Any]:
    """Return the newest weights with some of them changed."""

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
    return fault(HFEngine, "submit")(lambda real, self, asked: real(self, list(map(change, asked))))


@fault(HFEngine, "__init__")
def raw_log_probs(real: Any, self: HFEngine, **options: Any) -> None:
    real(self, **{**options, "logprobs_mode": "raw_logprobs"})


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


@fault(Adapters, "merged")
def base_weights(real: Any, self: Adapters, weight: torch.Tensor) -> torch.Tensor:
    layers, self._layers = self._layers, {}
    found = real(self, weight)
    self._layers = layers
    return found


def leaking(at_once: bool) -> Callable[[Patch], None]:
    """Let packed sequences see those before them, at once or after samples were generated."""

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
    """Turn dropout on after the first training step, as if train() were called and never undone."""
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


@fault(ActorLoss, "__call__")
def own_counts(real: Any, self: Any, out: Any, columns: Any, offsets: Any, counts: Counts) -> Any:
    own = Counts(max(1, int(columns["response_mask"].sum())), max(1, len(offsets) - 1))
    return real(self, out, columns, offsets, own)


@fault(ActorLoss, "__call__")
def fresh_old(real: Any, self: Any, out: Any, columns: Any, offsets: Any, counts: Any) -> Any:
    return real(self, out, {**columns, "old_log_probs": out["log_probs"].detach()}, offsets, counts)


@fault(ActorWorker, "_add_engine")
def one_model(real: Any, self: ActorWorker, role: Any, *args: Any, **options: Any) -> Any:
    return self.hold("ref", self.engines["actor"]) if role == "ref" else real(self, role, *args, **options)


@fault(RewardWorker, "compute_scores")
def other_scores(real: Any, self: RewardWorker, batch: DataProto) -> DataProto:
    return real(self, batch[[*range(1, len(batch)), 0]])


@fault(BatchWorker, "compute_advantages")
def against(real: Any, self: BatchWorker, batch: DataProto, kl_coef: float) -> DataProto:
    found = real(self, batch, kl_coef)
    return column(found, "advantages", -found.ragged("advantages").values)


def prompts(change: Callable[[list[int]], list[int]], **special: Any) -> Callable[[Patch], None]:
    """Change the token ids of all prompts, and the special tokens that the checks know."""

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


@fault(Prompts, "state_dict")
def read_ahead(real: Any, self: Prompts) -> dict[str, Any]:
    found = real(self)
    return {**found, "position": found["position"] + self.batch_size}


@fault(SampledKLTerm, "__call__")
def turned_kl(real: Any, self: Any, given: Any) -> Any:
    """Return the estimator r - 1 - log r with the wrong sign of the logarithm."""
    kl_T = real(self, given)[0] + 2 * (given["ref_log_probs"] - given["log_probs"])
    return kl_T, {"kl": kl_T}


@fault(state.TrainState, "step")
def nothing_moves(real: Any, self: Any, *args: Any) -> None: ...


def no_rate(patch: Patch) -> None:
    patch.setattr(fsdp, "learning_rate", lambda optim, *args: 0.0)


def nothing(patch: Patch) -> None:
    """Change nothing: the fault is in the config."""
