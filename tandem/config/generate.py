"""Sections of `tandem generate` and `tandem eval`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tandem.config.data import Truncation
from tandem.config.deprecated import Deprecated
from tandem.config.model import LOADING
from tandem.config.rewards import CustomRewardConfig
from tandem.config.rollout import EngineConfig
from tandem.config.section import AsTuple, LocalPath, Paths, Section, key

ROWS = "data.reader"
OFFLINE = "offline.generate"
SCORING = "offline.eval"

OTHER_NAMES = {
    "data.n_samples": Deprecated("rollout.n"),
    "rollout.prompt_length": Deprecated("data.max_prompt_length"),
    "rollout.response_length": Deprecated("data.max_response_length"),
}
"""What verl's `main_generation` calls these keys."""


class RowsConfig(Section):
    """Prompts to answer, and the limits of their answers."""

    path: Paths = key(..., "parquet or .jsonl file of prompts, or a list", read_by=ROWS)
    prompt_key: str = key("prompt", "column of prompts: conversations, texts or token ids", read_by=ROWS)
    max_samples: int = key(-1, "use the first so many rows; -1: all", read_by=ROWS, ge=-1)
    max_prompt_length: int = key(512, "longest prompt, tokens", read_by=ROWS, ge=1)
    max_response_length: int = key(512, "longest response, tokens", read_by=OFFLINE, ge=1)
    filter_overlong_prompts: bool = key(False, "leave out prompts above max_prompt_length", read_by=ROWS)
    truncation: Truncation = key(
        "error", "what to do with a prompt above max_prompt_length; error: stop", read_by=ROWS
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "further arguments of the tokenizer's chat template", read_by=ROWS
    )


class GenerateDataConfig(RowsConfig):
    """Where prompts come from and responses go to."""

    output_path: LocalPath = key(
        ...,
        "file of the responses, .parquet or .jsonl; what is finished so far is beside it",
        read_by=OFFLINE,
    )


class EvalDataConfig(RowsConfig):
    """Problems with what their reward needs, and the report."""

    output_path: LocalPath = key(
        ..., "JSON file of the report; the scored responses go beside it, as parquet", read_by=SCORING
    )
    reward_fn_key: str = key("data_source", "column that names the reward function of a row", read_by=SCORING)
    response_key: str = key(
        "responses", "column of the responses to score, where there is no model.path", read_by=SCORING
    )


class ChatConfig(Section):
    """How a model is spoken to."""

    custom_chat_template: str | None = key(
        None, "Jinja chat template; null: the tokenizer's own", read_by=LOADING
    )
    trust_remote_code: bool = key(False, "run Python code that lies in the model folder", read_by=LOADING)


class SampledModelConfig(ChatConfig):
    """A model that only writes."""

    path: LocalPath = key(..., "Hugging Face model folder", read_by=LOADING)
    tokenizer_path: LocalPath = key(meaning="folder of the tokenizer", read_by=LOADING, inherits=".path")


class EvalModelConfig(ChatConfig):
    """The model to evaluate, unless its responses are in the data."""

    path: LocalPath | None = key(
        None, "Hugging Face model folder; null: the responses are in the data", read_by=LOADING
    )
    tokenizer_path: LocalPath | None = key(
        meaning="folder of the tokenizer", read_by=LOADING, inherits=".path"
    )


class OfflineRolloutConfig(EngineConfig):
    """The rollout engine and its sampling, without training."""

    n: int = key(1, "responses per prompt", read_by=OFFLINE, ge=1)
    temperature: float = key(1.0, "divides the logits; 0: greedy", read_by=OFFLINE, ge=0)
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = key(
        "bfloat16", "type of the weights and the computation", read_by=OFFLINE
    )


class OfflineTrainerConfig(Section):
    """What is not the model's and not the data's."""

    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "where the model lives; auto: CUDA if there is one", read_by=OFFLINE
    )
    seed: int = key(0, "seed of all random numbers", read_by="trainer", ge=0)


class GenerateConfig(Section):
    """The whole config of `tandem generate`."""

    data: GenerateDataConfig
    model: SampledModelConfig
    rollout: OfflineRolloutConfig = OfflineRolloutConfig()
    trainer: OfflineTrainerConfig = OfflineTrainerConfig()


class MeasuresConfig(Section):
    """What is computed from the scores."""

    k: Annotated[tuple[int, ...], AsTuple] = key(
        (), "ks of pass@k and maj@k, one or a list; empty: 2, 4, 8, … and all responses", read_by=SCORING
    )
    confidence: float = key(0.95, "probability of the confidence intervals", read_by=SCORING, gt=0, lt=1)
    bootstrap_samples: int = key(
        10000, "resamples of the problems, for the intervals", read_by=SCORING, ge=100
    )


class EvalConfig(Section):
    """The whole config of `tandem eval`."""

    data: EvalDataConfig
    model: EvalModelConfig
    rollout: OfflineRolloutConfig = OfflineRolloutConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    eval: MeasuresConfig = MeasuresConfig()
    trainer: OfflineTrainerConfig = OfflineTrainerConfig()
