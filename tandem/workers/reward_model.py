"""The worker for a trained reward model, which is a classifier that reads prompt and response.

The model scores the whole response, or each step of the response.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tandem.algorithms.masked import segment_sum
from tandem.config.changed_models import position_limit
from tandem.config.rewards import RewardModelConfig, ScorerTerm
from tandem.engines.train.base import JUDGED
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import ModelError
from tandem.models.architectures import judges_tokens
from tandem.models.loading import load_config, positions_of, require_scorer
from tandem.models.vocabulary import check_size, tokenizer_of_scorer
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching, response_texts
from tandem.workers.reading import Reader
from tandem.workers.reward import at_last_token, scored_batch


class RewardModelWorker(EngineWorker):
    """The worker that scores sequences, or the steps of sequences, with a reward model.

    Args:
        config: The resolved `reward_model` section.
        tokenizer: The policy's tokenizer, which decodes responses.
        device: See `EngineWorker`.
        collective_timeout_s: See `EngineWorker`.
        run: See `EngineWorker`.
        role: The name of the model in `config.scorers`.

    Raises:
        ModelError: The folder does not contain a reward model, or the model's vocabulary does not contain the
            policy's tokens.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        device: str,
        collective_timeout_s: float,
        run: RunFolder,
        role: str = "reward_model",
    ) -> None:
        super().__init__(run, role, device, collective_timeout_s)
        self.config = config
        self.term = config.scorers[role]
        self.tokenizer = tokenizer
        model, folder = config.model, self.term.path
        stored = load_config(folder, trust_remote_code=model.trust_remote_code)
        field = (
            "reward_model.model.path"
            if role == "reward_model"
            else f"reward_model.models.{role.partition('.')[2]}.path"
        )
        require_scorer(folder, stored, field)
        self.reader = self._make_reader(stored, field)
        self.engine = self.hold(
            "reward_model",
            FSDPEngine(
                folder,
                kind="score",
                model=model,
                fsdp=config.fsdp_config,
                optim=None,
                total_steps=0,
                sequence_parallel=config.ulysses_sequence_parallel_size,
                device=self.device,
            ),
        )
        if self.reader.own is not None:
            self.say(
                f"the reward model {folder} has another tokenizer or chat template than the policy, so it "
                "reads conversations that are formatted again from text."
            )

    def _make_reader(self, stored: PreTrainedConfig, field: str) -> Reader:
        term, remote = self.term, self.config.model.trust_remote_code
        own = tokenizer_of_scorer(
            term.path,
            self.tokenizer,
            tokenizer_path=term.tokenizer_path,
            chat_template=term.custom_chat_template,
            trust_remote_code=remote,
        )
        size = stored.get_text_config().vocab_size
        check_size(term.path, size, own or self.tokenizer, field=field)
        if judges_tokens(stored) and term.step_separator is None:
            raise ModelError(
                "a token classifier scores the steps of a response, but step_separator is missing",
                field=field,
                got=term.path,
                expected="the path and a step_separator",
                remedy='set it in reward_model.models, such as {steps: {path: …, step_separator: "\\n"}}',
            )
        if own is not None and term.step_separator is not None and not own.is_fast:
            raise ModelError(
                "this tokenizer cannot find the ends of steps, because it does not return token offsets",
                field=field,
                got=type(own).__name__,
                expected="a fast tokenizer (tokenizer.json)",
            )
        most, budget = position_limit(positions_of(stored)), self.config.forward_batching.max_tokens
        if budget is not None:
            budget *= self.config.ulysses_sequence_parallel_size
        limits = [limit for limit in (most, budget) if limit is not None]
        return Reader(self.tokenizer, own, term.step_separator, min(limits, default=None))

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="reward_model", blocking=False, balance="tokens")
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Score the prompt and response of each sample.

        Args:
            batch: The samples.

        Returns:
            A table with these columns. `scores` (B) fp32 is the head's output at the last token; with steps,
            it is the combination of the outputs at the steps' last tokens that `step_score` sets.
            `token_level_scores` ragged fp32 has the score at the last response token; with steps, it has each
            step's score at the step's last token. `reward_failed` (B) bool and `reward_why` (B) say whether
            and why a sample could not be read. `reward_extra` (B) are empty dicts. `response_text` (B) are
            the decoded responses.
        """
        micro, mask = micro_batching(self.config.forward_batching), batch.ragged("response_mask")
        texts = response_texts(self.tokenizer, batch)
        with self.working("reward", self.engine):
            reading = self.reader.read(batch, texts)
            read: dict[str, Tensor | Ragged] = {"tokens": reading.tokens}
            if reading.judged is not None:
                read[JUDGED] = reading.judged
            out = self.engine.forward(DataProto(read), outputs=frozenset({"scores"}), micro=micro)
        scores = out.ragged("scores")
        if reading.judged is None or reading.places is None:
            scores_B = scores.values[scores.offsets[1:] - 1].to(torch.float32)
            scores_B[list(reading.failures)] = 0.0
            placed = at_last_token(scores_B, mask)
        else:
            values_K = scores.values[reading.judged.values].to(torch.float32)
            rows_K = scores.row_ids()[reading.judged.values]
            scores_B = combine_step_scores(values_K, rows_K, len(mask), self.term)
            placed = mask.with_values(torch.zeros(len(mask.values)).index_put((reading.places,), values_K))
        failed_B = torch.zeros(len(texts), dtype=torch.bool)
        failed_B[list(reading.failures)] = True
        whys = [reading.failures.get(row, "") for row in range(len(texts))]
        return scored_batch(scores_B, placed, failed_B, [{} for _ in texts], whys, texts)

    compute_scores = compute_rm_score


def combine_step_scores(values_K: Tensor, rows_K: Tensor, samples: int, term: ScorerTerm) -> Tensor:
    """Return (B) the score of each sample, combined from its step scores; 0 without steps.

    Args:
        values_K: The scores of the steps, sample by sample.
        rows_K: The sample of each step.
        samples: B.
        term: The config section of the model. Its `step_score` names the combination, such as the minimum.
    """
    counts_B = torch.bincount(rows_K, minlength=samples)
    if term.step_score == "sum":
        return segment_sum(values_K, torch.cat([counts_B.new_zeros(1), counts_B.cumsum(0)]))
    found_B = torch.zeros(samples, dtype=values_K.dtype)
    if term.step_score == "min":
        return found_B.scatter_reduce(0, rows_K, values_K, "amin", include_self=False)
    ends_B = counts_B.cumsum(0) - 1
    return torch.where(counts_B > 0, values_K[ends_B.clamp(min=0)] if len(values_K) else found_B, found_B)
