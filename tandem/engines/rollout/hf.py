"""The slow reference engine, which calls transformers' `generate` on padded batches.

A batch is filled from the queue in order and runs until its last sequence has finished. The tokens are
sampled by the keyed sampler of the native engine (see `draws.keyed`). The sampler runs as a logits processor:
it bars all tokens except the sampled token, so that `generate` chooses this token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag, WeightSource
from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.checks import check_fits_model, check_idle
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.draws.stops import Decode
from tandem.engines.rollout.draws.written import Written
from tandem.engines.rollout.own_weights import ModuleEngine, OwnWeights
from tandem.engines.weight_sync import Digest, module_digest
from tandem.errors import EngineError
from tandem.models.angles import forget_lengths
from tandem.models.architectures import rows_attention
from tandem.models.routing import Mixtures, Routing
from tandem.models.small_copy import angle_limits
from tandem.protocol import Request, Sample
from tandem.protocol.rollout import LogprobsMode


class HFEngine(ModuleEngine):
    """A `RolloutEngine` in this process that calls transformers' `generate`.

    If the model's rotary angles change with the length of a sequence, each sequence runs alone and without a
    cache. transformers would otherwise take the angles of the longest sequence of the batch, and keep keys
    with other angles.

    Args:
        device: The device of the model.
        max_num_seqs: The maximum number of sequences of one batch.
        max_num_batched_tokens: The maximum number of prompt tokens of one batch, padding included. A longer
            prompt runs alone.
        logprobs_mode: Which log-probs samples store in `log_probs`.
        records_experts: Whether samples contain the experts that computed their tokens.
        max_length: See `ModuleEngine`.
        own: See `ModuleEngine`.
        decode: See `ModuleEngine`.
        log: See `ModuleEngine`.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        max_length: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        records_experts: bool = False,
        own: OwnWeights | None = None,
        decode: Decode | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(max_length, own, decode, log)
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._records_experts = records_experts
        self._waiting: deque[Request] = deque()

    def submit(self, requests: Sequence[Request]) -> None:
        self._check(requests, {request.id for request in self._waiting})
        self._waiting.extend(requests)

    def pending(self) -> int:
        return len(self._waiting)

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        """Drop waiting requests. Requests run only inside `poll`, so all partial samples are empty."""
        wanted = set(ids)
        dropped = [request for request in self._waiting if request.id in wanted]
        self._waiting = deque(request for request in self._waiting if request.id not in wanted)
        return [Written(request).sample("abort") for request in dropped] if keep_partial else []

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        source = self._take_source(source)
        check_fits_model(list(self._waiting), source.module.config)
        self._source, self._version = source, version
        return module_digest(source.module)

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        check_idle(len(self._waiting))
        if "weights" in tags:
            self._drop_weights()

    def poll(self, timeout_s: float) -> list[Sample]:
        """Run one batch until all its sequences are finished, and return the samples."""
        if not self._waiting:
            return []
        batch = self._next_batch()
        finished = self._generate(batch)
        for _ in batch:
            self._waiting.popleft()
        self._counters.line(len(batch), len(self._waiting), 0.0)
        return finished

    @property
    def _angles_change(self) -> bool:
        config: Any = None if self._source is None else self._source.module.config
        return config is not None and any(
            limit < self._max_length for limit in angle_limits(config.get_text_config())
        )

    def _next_batch(self) -> list[Request]:
        batch: list[Request] = []
        longest = 0
        for request in self._waiting:
            longest = max(longest, len(request.prompt_ids))
            full = len(batch) == self._max_num_seqs or self._angles_change
            if batch and (full or longest * (len(batch) + 1) > self._max_num_batched_tokens):
                break
            batch.append(request)
        return batch

    def _generate(self, batch: Sequence[Request]) -> list[Sample]:
        if self._source is None:
            raise EngineError("the engine has no weights yet", remedy="call update_weights before poll")
        prompts = [torch.tensor(request.prompt_ids, dtype=torch.int64) for request in batch]
        ids, mask = (
            pad_sequence(each, batch_first=True, padding_side="left").to(self._device)
            for each in (prompts, [torch.ones_like(prompt) for prompt in prompts])
        )
        rows = Rows(len(batch), self._logprobs_mode)
        rows.add(batch)
        module: Any = self._source.module
        forget_lengths(module)
        mixtures = module.mixtures if self._records_experts else None
        writer = _Writer(rows, self._version, self._decode, mixtures)
        with (
            torch.no_grad(),
            borrowed(module, rows_attention(module, module.config)),
            _no_generation_defaults(module),
            module.register_forward_hook(writer.read),
            nullcontext() if mixtures is None else mixtures.active(writer.routing),
        ):
            module.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                use_cache=not self._angles_change,
                synced_gpus=False,  # the weights are unsharded here, and other ranks have other prompts
                max_new_tokens=int(writer.rows.max_tokens.max()),
                pad_token_id=0,
                logits_processor=LogitsProcessorList([writer]),
                stopping_criteria=StoppingCriteriaList([writer.finished]),
            )
        self._counters.prefill_tokens += sum(map(len, prompts))
        self._counters.decode_steps += writer.steps - 1
        self._counters.wrote(int(writer.rows.produced.sum()))
        self._counters.running(len(batch))
        samples = [
            writer.rows.sample(row, "stop" if stopped else "length")
            for row, stopped in enumerate(writer.stopped)
        ]
        if mixtures is not None:
            writer.add_experts(samples, [len(prompt) for prompt in prompts])
        return samples


@contextmanager
def _no_generation_defaults(module: Any) -> Iterator[None]:
    """Hide the checkpoint's generation_config.json inside the context.

    The user did not request the stop tokens and penalties of this file.
    """
    before = module.generation_config
    module.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        module.generation_config = before


class _Writer(LogitsProcessor):
    """A logits processor that samples the next token of each unfinished row.

    The processor bars all tokens except the sampled token. A forward hook reads the logits from the model's
    output, because `generate` passes logits on only as float32.
    """

    def __init__(self, rows: Rows, version: int, decode: Decode | None, mixtures: Mixtures | None) -> None:
        self.rows = rows
        self.routing = Routing(records=True)
        self._mixtures = mixtures
        self._experts: list[Tensor] = []  # of each forward pass, (rows, tokens, L, K)
        self.done, self.stopped = np.zeros(rows.count, dtype=bool), np.zeros(rows.count, dtype=bool)
        self.steps = 0
        self._version = version
        self._decode = decode
        self._logits_RV = torch.empty(0)

    def read(self, module: nn.Module, inputs: object, output: Any) -> None:
        """Store the logits of the last position, and the choice of experts. This is a forward hook."""
        self._logits_RV = output.logits[:, -1]
        if self._mixtures is not None:
            experts_TLK = self._mixtures.recorded(self.routing)
            self._experts.append(experts_TLK.view(self.rows.count, -1, *experts_TLK.shape[1:]))
            self.routing.chosen.clear()

    def add_experts(self, samples: Sequence[Sample], prompts: Sequence[int]) -> None:
        """Set the experts of samples, given the lengths of their prompts, which are padded on the left."""
        experts_RTLK = torch.cat(self._experts, 1).cpu().numpy()
        for sample, experts_TLK, length in zip(samples, experts_RTLK, prompts, strict=True):
            first = max(prompts) - length
            computed = experts_TLK[first : first + length + len(sample.token_ids) - 1]
            sample.routed_experts = np.pad(computed, ((0, 1), (0, 0), (0, 0)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits_RV = self._logits_RV
        active = np.flatnonzero(~self.done)
        active_R = torch.from_numpy(active).to(logits_RV.device)
        params = self.rows.params(active, logits_RV.shape[1], logits_RV.device)
        drawn = self.rows.draw(active, logits_RV[active_R], params)
        self.done[active], self.stopped[active] = self.rows.accept(active, drawn, self._version, self._decode)
        self.steps += 1
        tokens_R = torch.from_numpy(self.rows.last_token).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_R[:, None], 0.0)

    def finished(self, input_ids: Tensor, scores: object, **options: object) -> Tensor:
        """Return which rows are finished, as a stopping criterion of `generate`."""
        return torch.from_numpy(self.done.copy()).to(input_ids.device)
