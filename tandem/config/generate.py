"""The configs of `tandem generate` and `tandem eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tandem.config.data import CACHE_DIR, WORKERS, Truncation
from tandem.config.needs import Check, ModelFolder, countable, files, no_greedy_repeats
from tandem.config.rewards import CustomRewardConfig, RewardConfig
from tandem.config.rollout import EngineConfig
from tandem.config.section import AsTuple, LocalPath, Paths, Section, When, key, section
from tandem.config.view import root
from tandem.errors import ConfigError
from tandem.peers.table import Rule

OTHER_NAMES = {
    "data.n_samples": Rule("data.n_samples", now=("rollout.n",)),
    "rollout.prompt_length": Rule("rollout.prompt_length", now=("data.max_prompt_length",)),
    "rollout.response_length": Rule("rollout.response_length", now=("data.max_response_length",)),
}
"""What verl's `main_generation` calls these keys."""


def _ends_in(*suffixes: str) -> Check:
    """The output's name says its format."""
    return Check(
        lambda own, file: not file.endswith(suffixes),
        "unknown format",
        expected=f"a name that ends in {' or '.join(suffixes)}",
    )


def _possible(own: Any, name: str) -> Iterator[ConfigError]:
    yield from countable(
        getattr(own, name), max(1, root(own).data.max_samples), "prompts", "data.max_samples"
    )


class RowsConfig(Section):
    """Prompts to answer, and the limits of their answers.

    Attributes:
        path: parquet or .jsonl file of prompts, or a list
        prompt_key: column of prompts: conversations, texts or token ids
        max_samples: use the first so many rows; -1: all
        max_prompt_length: longest prompt, tokens
        max_response_length: longest response, tokens
        filter_overlong_prompts: leave out prompts above max_prompt_length
        truncation: what to do with a prompt above max_prompt_length; error: stop
        apply_chat_template_kwargs: further arguments of the tokenizer's chat template
        filter_overlong_prompts_workers: processes that check, filter and tokenise files of more than 32 MiB;
            null: one for each processor
        cache_dir: folder of what was made of such files; entries unused for 30 days are removed
    """

    path: Paths = key(..., needs=files)
    prompt_key: str = "prompt"
    max_samples: int = key(-1, ge=-1)
    max_prompt_length: int = key(512, ge=1)
    max_response_length: int = key(512, ge=1)
    filter_overlong_prompts: bool = False
    truncation: Truncation = "error"
    apply_chat_template_kwargs: dict[str, Any] = key({})
    filter_overlong_prompts_workers: int | None = WORKERS
    cache_dir: LocalPath = CACHE_DIR


class GenerateDataConfig(RowsConfig):
    """Where prompts come from and responses go to.

    Attributes:
        output_path: file of the responses, .parquet or .jsonl; what is finished so far is beside it
    """

    output_path: LocalPath = key(..., needs=_ends_in(".parquet", ".jsonl"))


class EvalDataConfig(RowsConfig):
    """Problems with what their reward needs, and the report.

    Attributes:
        output_path: JSON file of the report; the scored responses go beside it, as parquet
        reward_fn_key: column that names the reward function of a row
        response_key: column of the responses to score, where there is no model.path
    """

    output_path: LocalPath = key(..., needs=_ends_in(".json"))
    reward_fn_key: str = "data_source"
    response_key: str = "responses"


class ChatConfig(Section):
    """How a model is spoken to.

    Attributes:
        custom_chat_template: Jinja chat template; null: the tokenizer's own
        trust_remote_code: run Python code that lies in the model folder
    """

    custom_chat_template: str | None = None
    trust_remote_code: bool = False


_MODEL, _TOKENIZER = ModelFolder("config.json"), ModelFolder("tokenizer_config.json")


class SampledModelConfig(ChatConfig):
    """A model that only writes.

    Attributes:
        path: Hugging Face model folder
        tokenizer_path: folder of the tokenizer
    """

    path: LocalPath = key(..., needs=_MODEL)
    tokenizer_path: LocalPath = key(inherits=".path", needs=_TOKENIZER)


class EvalModelConfig(ChatConfig):
    """The model to evaluate, unless its responses are in the data.

    Attributes:
        path: Hugging Face model folder; null: the responses are in the data
        tokenizer_path: folder of the tokenizer
    """

    path: LocalPath | None = key(None, needs=_MODEL)
    tokenizer_path: LocalPath | None = key(inherits=".path", needs=_TOKENIZER)


class OfflineRolloutConfig(EngineConfig):
    """The rollout engine and its sampling, without training.

    Attributes:
        n: responses per prompt
        temperature: divides the logits; 0: greedy
        dtype: type of the weights and the computation
    """

    n: int = key(1, needs=(no_greedy_repeats(lambda own: own.temperature == 0), _possible), ge=1)
    temperature: float = key(1.0, ge=0)
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"


class OfflineTrainerConfig(Section):
    """What is not the model's and not the data's.

    Attributes:
        device: where the model lives; auto: CUDA if there is one
        seed: seed of all random numbers
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = key(0, ge=0)


class GenerateConfig(Section):
    """The whole config of `tandem generate`."""

    data: GenerateDataConfig
    model: SampledModelConfig
    rollout: OfflineRolloutConfig = OfflineRolloutConfig()
    trainer: OfflineTrainerConfig = OfflineTrainerConfig()


class MeasuresConfig(Section):
    """What is computed from the scores.

    Attributes:
        k: ks of pass@k and maj@k, one or a list; empty: 2, 4, 8, … and all responses
        confidence: probability of the confidence intervals
        bootstrap_samples: resamples of the problems, for the intervals
    """

    k: Annotated[tuple[int, ...], AsTuple] = ()
    confidence: float = key(0.95, gt=0, lt=1)
    bootstrap_samples: int = key(10000, ge=100)


_WRITES = When(lambda own: own.model.path is not None, "with model.path")
_GIVEN = When(lambda own: own.model.path is None, "without model.path, where the responses are in the data")
_OF_PROMPTS = (
    "prompt_key",
    "max_prompt_length",
    "max_response_length",
    "filter_overlong_prompts",
    "truncation",
    "apply_chat_template_kwargs",
    "filter_overlong_prompts_workers",
    "cache_dir",
)


class EvalConfig(Section):
    """The whole config of `tandem eval`."""

    data: EvalDataConfig = section(below={**dict.fromkeys(_OF_PROMPTS, _WRITES), "response_key": _GIVEN})
    model: EvalModelConfig = section(when=_WRITES)
    rollout: OfflineRolloutConfig = section(OfflineRolloutConfig(), when=_WRITES)
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    reward: RewardConfig = RewardConfig()
    eval: MeasuresConfig = MeasuresConfig()
    trainer: OfflineTrainerConfig = section(OfflineTrainerConfig(), below={"device": _WRITES})
