"""`data`: prompt files and how they are cut into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from tandem.config.dynamic_sampling import CustomClassConfig, SamplerConfig
from tandem.config.needs import files
from tandem.config.section import LocalPath, Paths, Section, When, beside, key
from tandem.config.view import root
from tandem.errors import ConfigError

_VALIDATES = When(lambda own: bool(own.val_files), "with {val_files}", notice=True)
_WITHOUT_SAMPLER = When(
    lambda own: own.sampler.class_name is None, "without {sampler.class_name}, which draws the prompts"
)
WORKERS = key(None, ge=1, resumed="told")
CACHE_DIR = key("~/.cache/tandem/data", resumed="told")
Truncation = Literal["error", "left", "right", "middle"]


def _above_zero(own: Any, name: str) -> Iterator[ConfigError]:
    if wrong := [source for source, weight in own.mixture.items() if weight <= 0]:
        yield ConfigError(
            "no weight above 0",
            got=", ".join(wrong),
            remedy="leave the rows of this source out of data.train_files",
        )


class DataConfig(Section):
    """Prompts for training and validation (parquet in the users' format).

    Attributes:
        train_files: training prompts: parquet, Arrow, JSON or CSV files, a folder or pattern of them, a data
            set that `datasets` saved, reasoning-gym:NAME?…, hf:OWNER/NAME?…, or a list of these
        val_files: validation prompts, likewise; null: no validation
        train_batch_size: prompts per training step, over all devices
        gen_batch_size: prompts answered at a time, with algorithm.filter_groups; null: train_batch_size
        val_batch_size: prompts per validation batch; null: all at once
        max_prompt_length: longest prompt, tokens
        max_response_length: longest response, tokens
        prompt_key: column that holds the conversation
        image_key: column of images; a row that has any is refused, as models of text alone are trained
        video_key: column of videos; a row that has any is refused, as models of text alone are trained
        audio_key: column of sounds; a row that has any is refused, as models of text alone are trained
        reward_fn_key: column that names the reward function of a row
        answer_key: column of the answer, which rewards know as ground truth; null: reward_model.ground_truth
        system_key: column of a system message put before the prompt; null: none
        tools_key: column of tools for the chat template: a list of JSON schemas, or that as JSON; null: none
        apply_chat_template: a prompt that is a text is what the user says; false: it is already formatted
        mixture: weight of each data source in training batches; empty: every row once an epoch
        shuffle: a new order of the training prompts in each epoch
        seed: seed of that order
        filter_overlong_prompts: leave out prompts above max_prompt_length
        filter_overlong_prompts_workers: processes that check, filter and tokenise files of more than 32 MiB;
            null: one for each processor
        cache_dir: folder of what was made of such files; entries unused for 30 days are removed
        truncation: what to do with a prompt above max_prompt_length; error: stop
        train_max_samples: use the first so many training rows; -1: all
        val_max_samples: use the first so many validation rows; -1: all
        apply_chat_template_kwargs: further arguments of the tokenizer's chat template
    """

    train_files: Paths = key(..., needs=files)
    val_files: Paths = key((), needs=files, resumed="told")
    train_batch_size: int = key(1024, ge=1)
    gen_batch_size: int | None = key(
        None,
        when=When(
            lambda own: root(own).algorithm.filter_groups.enable, "with algorithm.filter_groups.enable=true"
        ),
        ge=1,
    )
    val_batch_size: int | None = key(None, when=_VALIDATES, ge=1, resumed="told")
    max_prompt_length: int = key(512, ge=1)
    max_response_length: int = key(512, ge=1)
    prompt_key: str = "prompt"
    image_key: str = key("images", resumed="told")
    video_key: str = key("videos", resumed="told")
    audio_key: str = key("audios", resumed="told")
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
    val_max_samples: int = key(-1, when=_VALIDATES, ge=-1, resumed="told")
    apply_chat_template_kwargs: dict[str, Any] = key({})
    custom_cls: CustomClassConfig = CustomClassConfig()
    sampler: SamplerConfig = SamplerConfig()

    @property
    def lengths(self) -> tuple[str, ...]:
        """The keys here whose sum is the longest sequence."""
        return ("max_prompt_length", "max_response_length")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt_length + self.max_response_length

    @property
    def prompts_at_a_time(self) -> int:
        """Prompts per generation batch."""
        return self.gen_batch_size or self.train_batch_size
