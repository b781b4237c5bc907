"""How responses are drawn: the config's settings, and the tokens that end a response."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from tandem.config.root import TrainConfig
from tandem.protocol import SamplingParams


def sampling(config: TrainConfig, stops: tuple[int, ...], *, validation: bool = False) -> SamplingParams:
    """The settings of training, or of validation.

    Args:
        stops: see `stop_token_ids`.
    """
    rollout = config.actor_rollout_ref.rollout
    settings = rollout.val_kwargs if validation else rollout
    greedy = validation and not rollout.val_kwargs.do_sample
    return SamplingParams(
        temperature=0.0 if greedy else settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stops,
        stop=tuple(rollout.stop),
        seed=config.trainer.seed,
    )


def stop_token_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end of sequence and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    if (Path(model_path) / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
        ids |= set(declared) if isinstance(declared, list) else {declared}
    return tuple(sorted(token for token in ids if token is not None))
