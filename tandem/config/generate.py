"""The configs of `tandem generate` and `tandem eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tandem.config.data import CACHE_DIR, WORKERS, Truncation
from tandem.config.model import OVERRIDE_CONFIG, RESIZE_EMBEDDINGS
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
"""A dict from a key of verl's `main_generation` to the key's name in Tandem."""


def _ends_in(*suffixes: str) -> Check:
    """Return the check that the name of the output file has one of these suffixes."""
    return Check(
        lambda own, file: not file.endswith(suffixes),
        "unknown format",
        expected=f"a file name that ends in {' or '.join(suffixes)}",
    )


def _n_countable(own: Any, name: str) -> Iterator[ConfigError]:
    yield from countable(
        getattr(own, name), max(1, root(own).data.max_samples), "prompts", "data.max_samples"
    )


class RowsConfig(Section):
    """Prompts to answer, and limits for the responses.

    Attributes:
        path: Parquet or .jsonl file of prompts, or a list of such files.
        prompt_key: Column of prompts, which are conversations, texts or token ids.
        max_samples: Use only this many rows from the start. -1: all rows.
        max_prompt_length: Longest prompt, in tokens.
        max_response_length: Longest response, in tokens.
        filter_overlong_prompts: Skip prompts that are longer than max_prompt_length.
        truncation: What to do with a prompt that is longer than max_prompt_length. error: stop with an error.
            left, right, middle: cut tokens off its beginning, its end or out of its middle.
        apply_chat_template_kwargs: Additional arguments of the tokenizer's chat template: {name: value, …}.
        filter_overlong_prompts_workers: Processes that check, filter and tokenize data files larger than 32
            MiB. null: one per CPU core.
        cache_dir: Folder that caches the result of reading such large files. Entries that are unused for 30
            days are deleted.
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
    """The input file of prompts and the output file of responses.

    Attributes:
        output_path: File for the responses, .parquet or .jsonl. Finished responses are saved next to it
            during the run.
    """

    output_path: LocalPath = key(..., needs=_ends_in(".parquet", ".jsonl"))


class EvalDataConfig(RowsConfig):
    """The file of problems with the columns that the reward function needs, and the file of the report.

    Attributes:
        output_path: JSON file for the report. The scored responses are written next to it, as Parquet.
        reward_fn_key: Column that names the reward function of a row.
        response_key: Column of the responses to score, if model.path is not set.
    """

    output_path: LocalPath = key(..., needs=_ends_in(".json"))
    reward_fn_key: str = "data_source"
    response_key: str = "responses"


class ChangesConfig(Section):
    """The changes of a model, and whether its code runs.

    Attributes:
        override_config: Fields of the model's config.json that this command changes, for example
            {max_position_embeddings: 131072}. Nested fields are merged.
        resize_embeddings: Number of rows of the embedding and the output head, for a tokenizer with added
            tokens. New rows are the mean of the old rows. null: as many as the folder has.
        trust_remote_code: Run Python code that is in the model folder.
    """

    override_config: dict[str, Any] = OVERRIDE_CONFIG
    resize_embeddings: int | None = RESIZE_EMBEDDINGS
    trust_remote_code: bool = False


class ChatConfig(ChangesConfig):
    """The settings that format conversations for a model.

    Attributes:
        custom_chat_template: Jinja chat template. null: the template of the tokenizer.
    """

    custom_chat_template: str | None = None


_MODEL, _TOKENIZER = ModelFolder("config.json"), ModelFolder("tokenizer_config.json")


class TriedModelConfig(ChangesConfig):
    """A model whose architecture is tested.

    Attributes:
        path: Hugging Face folder of the model.
    """

    path: LocalPath = key(..., needs=_MODEL)


class TriedConfig(Section):
    """The whole config of `tandem check --model`."""

    model: TriedModelConfig


class SampledModelConfig(ChatConfig):
    """A model that only generates responses.

    Attributes:
        path: Hugging Face folder of the model.
        tokenizer_path: Folder of the tokenizer.
    """

    path: LocalPath = key(..., needs=_MODEL)
    tokenizer_path: LocalPath = key(inherits=".path", needs=_TOKENIZER)


class EvalModelConfig(ChatConfig):
    """The model to evaluate, unless the data already contains its responses.

    Attributes:
        path: Hugging Face folder of the model. null: the data already contains the responses.
        tokenizer_path: Folder of the tokenizer.
    """

    path: LocalPath | None = key(None, needs=_MODEL)
    tokenizer_path: LocalPath | None = key(inherits=".path", needs=_TOKENIZER)


class OfflineRolloutConfig(EngineConfig):
    """The rollout engine and its sampling settings, without training.

    Attributes:
        n: Responses per prompt.
        temperature: The logits are divided by this value. 0: greedy.
        dtype: Data type of the weights and the computation.
    """

    n: int = key(1, needs=(no_greedy_repeats(lambda own: own.temperature == 0), _n_countable), ge=1)
    temperature: float = key(1.0, ge=0)
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"


class OfflineTrainerConfig(Section):
    """The device and the seed.

    Attributes:
        device: Where the model is placed. auto: CUDA if a CUDA device is available, otherwise CPU.
        seed: Seed of all random numbers.
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
    """The statistics to compute from the scores.

    Attributes:
        k: The values of k for pass@k and maj@k: one integer, or a list. Empty: 2, 4, 8, … and the number of
            all responses.
        confidence: Probability level of the confidence intervals.
        bootstrap_samples: Number of bootstrap resamples of the problems for the confidence intervals.
    """

    k: Annotated[tuple[int, ...], AsTuple] = ()
    confidence: float = key(0.95, gt=0, lt=1)
    bootstrap_samples: int = key(10000, ge=100)


_WRITES = When(lambda own: own.model.path is not None, "if model.path is set")
_GIVEN = When(
    lambda own: own.model.path is None,
    "if model.path is not set, because the data then contains the responses",
)
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
