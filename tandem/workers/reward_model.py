"""A trained reward model: a sequence classifier with one label reads prompt and response and gives the
response its score."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.rewards import RewardModelConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.models.loading import check_vocabulary, load_config, require_scorer
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching, response_texts
from tandem.workers.probes import SCORED, fingerprint
from tandem.workers.reward import at_last_token


class RewardModelWorker(EngineWorker):
    """The worker that scores whole sequences with a model.

    Args:
        config: the resolved reward_model section.
        tokenizer: the policy's, whose ids the model reads; decodes responses.
        device, collective_timeout_s, run: see `EngineWorker`.

    Raises:
        ModelError: a folder that is no reward model with one label, or one over another vocabulary.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        device: str,
        collective_timeout_s: float,
        run: RunFolder,
    ) -> None:
        super().__init__(run, "reward_model", device, collective_timeout_s)
        self.config = config
        self.tokenizer = tokenizer
        model, remote = config.model, config.model.trust_remote_code
        folder = load_config(model.path, trust_remote_code=remote)
        require_scorer(model.path, folder)
        check_vocabulary(model.path, folder.get_text_config().vocab_size, tokenizer, trust_remote_code=remote)
        self.engine = self.hold(
            "reward_model",
            FSDPEngine(
                model.path,
                kind="score",
                model=model,
                fsdp=config.fsdp_config,
                optim=None,
                total_steps=0,
                sequence_parallel=config.ulysses_sequence_parallel_size,
                device=self.device,
            ),
        )

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="reward_model", blocking=False, balance="tokens")
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Scores prompt and response together.

        Returns:
            `scores` (B) fp32, the head's output at the last token; `token_level_scores` ragged fp32 with
            it at the last response token; `reward_extra` (B) empty dicts; the decoded `response_text`.
        """
        micro = micro_batching(self.config.forward_batching)
        with self.timeline.phase("reward"), self.on_device(self.engine):
            out = self.engine.forward(
                batch.select(["tokens"], ()), outputs=frozenset({"scores"}), micro=micro
            )
        scores = out.ragged("scores")
        scores_B = scores.values[scores.offsets[1:] - 1].to(torch.float32)
        placed = at_last_token(scores_B, batch.ragged("response_mask"))
        texts = response_texts(self.tokenizer, batch)
        return DataProto(
            {"scores": scores_B, "token_level_scores": placed, SCORED: fingerprint(batch.ragged("tokens"))},
            {"reward_extra": [{} for _ in texts], "response_text": texts},
        )

    compute_scores = compute_rm_score
