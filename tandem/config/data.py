"""The section `data`: prompt files, their columns, and the batches made from their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from tandem.config.dynamic_sampling import CustomClassConfig, SamplerConfig
from tandem.config.needs import files
from tandem.config.section import LocalPath, Paths, Section, When, beside, key
from tandem.config.view import root
from tandem.errors import ConfigError

_VALIDATES = When(lambda own: bool(own.val_files), "if {val_files} is set", notice=True)
_WITHOUT_SAMPLER = When(
    lambda own: own.sampler.class_name is None,
    "if {sampler.class_name} is not set, because a sampler draws the prompts itself",
)
WORKERS = key(None, ge=1, resumed="reported")
CACHE_DIR = key("~/.cache/tandem/data", resumed="reported")
Truncation = Literal["error", "left", "right", "middle"]


def _above_zero(own: Any, name: str) -> Iterator[ConfigError]:
    if wrong := [source for source, weight in own.mixture.items() if weight <= 0]:
        yield ConfigError(
            "a weight is not above 0",
            got=", ".join(wrong),
            remedy="to exclude a source, remove its rows from data.train_files",
        )


class DataConfig(Section):
    """The prompts for training and validation, in verl's format.

    Attributes:
        train_files: Training prompts: Parquet, Arrow, JSON or CSV files, a folder or glob pattern of such
            files, a dataset saved by `datasets`, reasoning-gym:NAME?…, hf:OWNER/NAME?…, or a list of these.
        val_files: Validation prompts, in the same formats as train_files. null: no validation.
        train_batch_size: Prompts per training step, over all devices.
        gen_batch_size: Prompts per generation batch if algorithm.filter_groups is on. null: train_batch_size.
        val_batch_size: Prompts per validation batch. null: all at once.
        max_prompt_length: Longest prompt, in tokens.
        max_response_length: Longest response, in tokens.
        prompt_key: Column of the prompt, which is a conversation.
        image_key: Column of images. A row that has an image is refused, because only text models are trained.
        video_key: Column of videos. A row that has a video is refused, because only text models are trained.
        audio_key: Column of audio. A row that has audio is refused, because only text models are trained.
        reward_fn_key: Column that names the reward function of a row.
        answer_key: Column of the correct answer, which reward functions receive as ground_truth. null: the
            field ground_truth of the column reward_model.
        system_key: Column of a system message that is put before the prompt. null: none.
        tools_key: Column of tools for the chat template: a list of JSON schemas, or such a list as JSON text.
            null: none.
        apply_chat_template: If a prompt is plain text, put it into the chat template as the user's message.
            false: use plain text unchanged, because it is already formatted.
        mixture: Weight of each data source in training batches: {source: weight, …}. Empty: each row is used
            once per epoch.
        shuffle: Shuffle the training prompts in each epoch.
        seed: Seed of the shuffle.
        filter_overlong_prompts: Skip prompts that are longer than max_prompt_length.
        filter_overlong_prompts_workers: Processes that check, filter and tokenize data files larger than 32
            MiB. null: one per CPU core.
        cache_dir: Folder that caches the result of reading such large files. Entries that are unused for 30
            days are deleted.
        truncation: What to do with a prompt that is longer than max_prompt_length. error: stop with an error.
            left, right, middle: cut tokens off its beginning, its end or out of its middle.
        train_max_samples: Use only this many rows from the start of the training data. -1: all rows.
        val_max_samples: Use only this many rows from the start of the validation data. -1: all rows.
        apply_chat_template_kwargs: Additional arguments of the tokenizer's chat template: {name: value, …}.
    """

    train_files: Paths = key(..., needs=files)
    val_files: Paths = key((), needs=files, resumed="reported")
    train_batch_size: int = key(1024, ge=1)
    gen_batch_size: int | None = key(
        None,
        when=When(
            lambda own: root(own).algorithm.filter_groups.enable, "if algorithm.filter_groups.enable=true"
        ),
        ge=1,
    )
    val_batch_size: int | None = key(None, when=_VALIDATES, ge=1, resumed="reported")
    max_prompt_length: int = key(512, ge=1)
    max_response_length: int = key(512, ge=1)
    prompt_key: str = "prompt"
    image_key: str = key("images", resumed="reported")
    video_key: str = key("videos", resumed="reported")
    audio_key: str = key("audios", resumed="reported")
    reward_fn_key: str = "data_source"
    answer_key: str | None = None
    system_key: str | None = None
    tools_key: str | None = None
    apply_chat_template: bool = False
    mixture: dict[str, float] = key({}, when=_WITHOUT_SAMPLER, needs=_above_zero)
    shuffle: bool = key(True, when=_WITHOUT_SAMPLER)
    seed: int = key(0, inherits="trainer.seed", when=beside("shuffle", True, notice=True), ge=0)
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: int | None = WORKERS
    cache_dir: LocalPath = CACHE_DIR
    truncation: Truncation = "error"
    train_max_samples: int = key(-1, ge=-1)
    val_max_samples: int = key(-1, when=_VALIDATES, ge=-1, resumed="reported")
    apply_chat_template_kwargs: dict[str, Any] = key({})
    custom_cls: CustomClassConfig = CustomClassConfig()
    sampler: SamplerConfig = SamplerConfig()

    @property
    def lengths(self) -> tuple[str, ...]:
        """The keys of this section whose values sum to the length of the longest sequence."""
        return ("max_prompt_length", "max_response_length")

    @property
    def longest(self) -> int:
        """The length of the longest sequence, in tokens."""
        return self.max_prompt_length + self.max_response_length

    @property
    def prompts_at_a_time(self) -> int:
        """The number of prompts per generation batch."""
        return self.gen_batch_size or self.train_batch_size
