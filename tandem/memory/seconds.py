"""A model of the seconds of each phase of a training step, computed from config and model shape.

The prediction uses the operations and the memory traffic of a device. It also uses the ratio of actual time
to best time, as measured on this type of device.

The time of a phase is a weighted sum of five terms:

- its operations divided by the device's measured rate; the factor is the ratio of actual time to best time.
- its bytes divided by the measured rate of a copy; the factor is the ratio of actual time to best time.
- its number of layer calls; the factor is the seconds per call.
- its number of tokens; the factor is the seconds per token.
- its number of samples; the factor is the seconds per sample.

`tandem bench` measures the factors (see `tandem.memory.device_file`). No term contains the communication
between devices. For a phase that gathers weights from other devices, use factors of runs that also did so.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tandem.config.actor import ActorConfig
from tandem.config.batching import Batching
from tandem.config.critic import CriticConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.rollout import EngineConfig
from tandem.config.root import TrainConfig
from tandem.config.tables import READS_SQUARES
from tandem.memory.activations import Recomputed, Setup, layer_bytes
from tandem.memory.shapes import ModelShape

Factors = Mapping[str, Sequence[float]]
"""A dict from phase to its five factors.

The first two factors are the ratios of actual time to best time, for operations and for copied bytes. The
other factors are the seconds per layer call, per token and per sample.
"""

_ADAM_BYTES = 40
"""Bytes per trained parameter and update, in fp32.

The gradient, the weight and both moments are read. The weight and both moments are written. The gradient is
also read and written for its norm and for clipping, and cleared.
"""
_NOISE = 0.02
"""The relative difference between repeated measurements. A term must explain more than this."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The best measured speeds of a device.

    Attributes:
        operations: operations per second of a square matrix product, in the compute dtype.
        bytes: bytes per second that a copy within the device's memory reads and writes.
    """

    operations: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one device in one phase of a step.

    Attributes:
        operations: operations of matrix products; a multiplication and an addition count as two.
        bytes: bytes of weights, optimizer state, keys, values and saved activations; each read and each write
            is counted.
        calls: number of forward and backward calls of all layers.
        tokens: number of tokens.
        samples: number of samples.
    """

    operations: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0
    tokens: float = 0.0
    samples: float = 0.0

    def floor(self, rates: Rates) -> float:
        """Return the minimum seconds: the maximum of the operations' time and the bytes' time."""
        return max(self.operations / rates.operations, self.bytes / rates.bytes)

    def terms(self, rates: Rates) -> NDArray[np.float64]:
        """Return the five terms by which the factors are multiplied."""
        own = np.array(astuple(self))
        return own / (rates.operations, rates.bytes, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a step's sequences.

    Attributes:
        prompts: (B) tokens of each prompt.
        responses: (B, n) tokens of each response.
    """

    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]

    @property
    def total(self) -> int:
        return int(self.prompts.sum() * self.responses.shape[1] + self.responses.sum())


def step_work(
    config: TrainConfig, shape: ModelShape, prompts: ArrayLike, responses: ArrayLike, *, item: int
) -> dict[str, Work]:
    """Return the work of a device in each phase of a training step.

    Args:
        config: the config of the run.
        shape: the shape of the policy; critic and reference are assumed to have the same shape.
        prompts: tokens of each prompt of the step.
        responses: tokens of each response; the responses of a prompt are consecutive.
        item: bytes per element in the compute dtype.
    """
    policy, algorithm, trainer = config.actor_rollout_ref, config.algorithm, config.trainer
    actor, rollout, ref = policy.actor, policy.rollout, policy.ref
    whole = _Batch(shape, np.asarray(prompts), np.asarray(responses), item)
    trains, writes = trainer.devices_of("actor"), trainer.devices_of("rollout")
    updates = actor.ppo_epochs * -(-config.data.train_batch_size // actor.ppo_mini_batch_size)
    correction = algorithm.rollout_correction
    old = updates > 1 or algorithm.use_kl_in_reward or algorithm.adv_estimator in READS_SQUARES
    work = {
        "generate_sequences": whole.written(rollout, writes),
        "weights": Work(bytes=(4 + 3 * item) * shape.streamed()),
        "reward": Work(tokens=whole.tokens, samples=whole.samples),
        "adv": Work(tokens=whole.tokens, samples=whole.samples),
        "update_actor": _update(whole, actor, policy.model, trains),
        "rest": Work(tokens=whole.tokens, samples=whole.samples, calls=shape.decoder.layers),
    }
    if old and not correction.bypass_mode:
        work["old_log_prob"] = whole.forward(rollout.log_prob_batching, actor.fsdp_config, trains)
    if config.needs_reference:
        work["ref"] = whole.forward(ref.log_prob_batching, ref.fsdp_config, trainer.devices_of("ref"))
    if config.needs_critic:
        critic, devices = config.critic, trainer.devices_of("critic")
        values = _Batch(replace(shape, vocabulary=1), whole.prompts, whole.responses, item)
        work["values"] = values.forward(critic.forward_batching, critic.fsdp_config, devices)
        work["update_critic"] = _update(values, critic, critic.model, devices)
    return work


class _Batch:
    """The sequences of a step, with methods for the work of each phase."""

    def __init__(self, shape: ModelShape, prompts: NDArray[Any], responses: NDArray[Any], item: int) -> None:
        self.shape, self.prompts, self.responses, self.item = shape, prompts, responses, item
        self.samples = len(responses)
        self.before = np.repeat(prompts, self.samples // len(prompts))
        self.lengths = self.before + responses
        self.tokens = int(self.lengths.sum())

    def forward(self, batching: Batching, fsdp: FSDPConfig, devices: int) -> Work:
        """Return the work of one forward pass over all sequences.

        The head runs only on the tokens of responses. On average, a token attends to half of its sequence.
        Each micro-batch reads the weights, and reads and writes the hidden states.
        """
        shape, d = self.shape, self.shape.decoder
        split = fsdp.tensor_parallel_size * fsdp.pipeline_parallel_size
        micro = self.micro_batches(batching, devices // split)
        attended = d.layers * d.heads * d.widths * float((self.lengths**2).sum())
        operations = (
            2 * shape.matrices * self.tokens + 2 * shape.embedding * int(self.responses.sum()) + attended
        )
        streamed = 2 * self.item * d.hidden * d.layers * self.tokens
        moved = micro * self.item * shape.streamed(fsdp.expert_parallel_size) / split + streamed / devices
        calls = micro * d.layers / fsdp.pipeline_parallel_size
        return Work(operations / devices, moved, calls, self.tokens / devices, self.samples / devices)

    def micro_batches(self, batching: Batching, devices: int, parts: int = 1) -> int:
        """Return the number of micro-batches of one device.

        Args:
            batching: the rule that splits the sequences of a device into micro-batches.
            devices: number of devices that process different tokens.
            parts: number of mini-batches in the batch.
        """
        if batching.max_tokens is not None:
            return parts * -(-self.tokens // (devices * parts * batching.max_tokens))
        share = -(-self.samples // (devices * parts))
        return parts * -(-share // (batching.max_samples or share))

    def written(self, rollout: EngineConfig, devices: int) -> Work:
        """Return the work of generation.

        A prompt is computed once for all of its responses. Then each decode step generates one token of each
        running sequence. A step reads the weights once, and the keys and values of every running sequence.
        """
        shape, d, split = self.shape, self.shape.decoder, rollout.split
        share = self.responses[:: max(1, devices // split)]
        prompt = int(self.prompts.sum()) / devices
        steps = decode_steps(share.tolist(), rollout.max_num_seqs)
        steps += -(-int(prompt * split) // rollout.max_num_batched_tokens)
        tokens = int(self.responses.sum()) / devices
        context = float((self.before * self.responses + self.responses**2 / 2).sum()) / devices
        width = d.layers * d.widths
        prefill = width * d.heads * float((self.prompts**2).sum()) / devices
        operations = 2 * shape.matrices * (tokens + prompt) + 2 * shape.embedding * tokens
        operations = operations + 2 * width * d.heads * context + prefill
        moved = steps * self.item * shape.streamed() / split
        moved += self.item * width * d.key_heads * context
        return Work(operations, moved, steps * d.layers, tokens, self.samples / devices)


def _update(batch: _Batch, section: ActorConfig | CriticConfig, model: BackboneConfig, devices: int) -> Work:
    """Return the work of all updates of a role in a step.

    The backward pass needs twice the operations of the forward pass, or as many as the forward pass if only
    adapters are trained. If whole layers are recomputed, one more forward pass is added. The head's logits
    are computed twice, because they are not kept. Saved activations are written and read. Each pass reads the
    weights.
    """
    shape, d, epochs, fsdp = batch.shape, batch.shape.decoder, section.ppo_epochs, section.fsdp_config
    minis = -(-len(batch.prompts) // section.ppo_mini_batch_size)
    again = model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "full"
    passes = (2 if model.lora_rank else 3) + again
    split = fsdp.tensor_parallel_size * fsdp.pipeline_parallel_size
    micro = batch.micro_batches(section.train_batching, devices // split, minis)
    once = batch.forward(section.train_batching, fsdp, devices)
    head = 2 * shape.embedding * float(batch.responses.sum()) / devices
    mode: Recomputed = "full" if again else "none"
    each = sum(share * layer_bytes(kind, Setup(batch.item)).kept(mode) for share, kind in d.kinds)
    kept = each * d.layers * batch.tokens / devices
    query, keys = d.heads * d.head_width, d.key_heads * d.head_width
    adapters = d.layers * model.lora_rank * (7 * d.hidden + 2 * (query + keys) + 3 * d.dense)
    learning = adapters or shape.streamed()
    operations = epochs * (passes * (once.operations - head) + 4 * head)
    read = batch.item * shape.streamed(fsdp.expert_parallel_size) / split
    moved = epochs * (passes * micro * read + 2 * kept)
    moved += epochs * minis * _ADAM_BYTES * learning / devices
    calls = epochs * micro * d.layers * passes / fsdp.pipeline_parallel_size
    return Work(operations, moved, calls, epochs * once.tokens, epochs * once.samples)


def decode_steps(responses: Sequence[int], slots: int) -> int:
    """Return the number of decoding steps until all responses are generated.

    Args:
        responses: tokens of each response, in the order in which they start.
        slots: number of sequences that run at the same time. When a sequence ends, the next one starts.
    """
    running = list(responses[:slots])
    heapq.heapify(running)
    for length in responses[slots:]:
        heapq.heappush(running, heapq.heappop(running) + length)
    return max(running, default=0)


def predict(work: Mapping[str, Work], rates: Rates, factors: Factors) -> dict[str, float]:
    """Return the seconds of each phase, and their sum as `step`.

    For a phase without factors, the prediction is twice the minimum `Work.floor`.
    """
    found = {
        phase: float(each.terms(rates) @ np.asarray(factors[phase]))
        if phase in factors
        else 2 * each.floor(rates)
        for phase, each in work.items()
    }
    return found | {"step": sum(found.values())}


def fit(observed: Sequence[tuple[Work, float]], rates: Rates) -> list[float]:
    """Fit the factors of a phase to measurements. No factor is negative.

    Every subset of the terms is fitted by least squares of the relative errors. The subset is chosen by
    Schwarz's criterion (BIC), which has a penalty for each term. If there are any operations, the subset
    always includes their term: without this term, the fit might match a few runs, but not larger models.

    Args:
        observed: the work and the measured seconds of each run.
        rates: the best speeds of the device.
    """
    rows = np.array([work.terms(rates) / seconds for work, seconds in observed])
    best, chosen = np.inf, np.zeros(rows.shape[1])
    present = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    for size in range(1, min(len(present), len(observed)) + 1):
        for columns in combinations(present, size):
            if columns[0] != present[0] == 0:
                continue
            part = rows[:, columns]
            scale = part.max(axis=0)
            found = np.linalg.lstsq(part / scale, np.ones(len(rows)), rcond=None)[0] / scale
            if found.min() < 0:
                continue
            spread = float(((part @ found - 1) ** 2).mean()) + _NOISE**2
            price = len(rows) * np.log(spread) + size * np.log(len(rows) + 1)
            if price < best - 1e-9:
                best, chosen = price, np.zeros(rows.shape[1])
                chosen[list(columns)] = found
    return [float(each) for each in chosen]


def forecast(phases: Mapping[str, float], tokens: int, steps: int, devices: int) -> dict[str, Any]:
    """Return the cost of a run: seconds per phase, tokens per second, days and device hours.

    Tokens per second and device hours are summed over all devices.

    Args:
        phases: the seconds of each phase, from `predict`.
        tokens: tokens of prompts and responses in a step.
        steps: number of steps of the run.
        devices: number of devices of all pools.
    """
    hours = steps * phases["step"] / 3600
    rate = tokens / phases["step"]
    return {"phases": phases, "tokens_per_s": rate, "days": hours / 24, "device_hours": hours * devices}
