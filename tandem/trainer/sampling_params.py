"""Make sampling parameters from a config."""

from __future__ import annotations

from tandem.config.rollout import EngineConfig, SamplingSection
from tandem.config.root import TrainConfig
from tandem.protocol import SamplingParams


def sampling(config: TrainConfig, stops: tuple[int, ...], *, validation: bool = False) -> SamplingParams:
    """Return the sampling parameters of training or of validation.

    Args:
        config: The config of the run.
        stops: The end-of-sequence tokens; see `tandem.models.ends.stop_token_ids`.
        validation: Whether to use the parameters of validation.
    """
    rollout = config.actor_rollout_ref.rollout
    settings = rollout.val_kwargs if validation else rollout
    greedy = validation and not rollout.val_kwargs.do_sample
    return sampling_params(
        settings,
        rollout,
        stops,
        temperature=0.0 if greedy else settings.temperature,
        max_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
    )


def sampling_params(
    settings: SamplingSection,
    rollout: EngineConfig,
    stops: tuple[int, ...],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> SamplingParams:
    """Make sampling parameters from sections of a config.

    Args:
        settings: The section with top-p, top-k, penalties and similar settings.
        rollout: The section with the stop strings and `ignore_eos`.
        stops: The end-of-sequence tokens; see `tandem.models.ends.stop_token_ids`.
        temperature: The temperature; 0 for greedy sampling.
        max_tokens: The length limit of a response.
        seed: The seed of the draws.
    """
    return SamplingParams(
        temperature=temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        min_tokens=settings.min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=() if rollout.ignore_eos else stops,
        stop=tuple(rollout.stop),
        seed=seed,
    )
