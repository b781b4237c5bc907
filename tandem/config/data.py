"""`data`: prompt files and how they are cut into batches."""

from __future__ import annotations

from typing import Any, Literal

from tandem.config.dynamic_sampling import SamplerConfig
from tandem.config.needs import files
from tandem.config.section import Paths, Section, When, beside, key
from tandem.config.view import root

_VALIDATES = When(lambda own: bool(own.val_files), "with {val_files}", notice=True)
_OF_TEXT = "a row that has any is refused, as models of text alone are trained"
Truncation = Literal["error", "left", "right", "middle"]


class DataConfig(Section):
    """Prompts for training and validation (parquet in the users' format)."""

    train_files: Paths = key(
        ...,
        "training prompts: parquet, Arrow, JSON or CSV files, a folder or pattern of them, a data set that "
        "`datasets` saved, reasoning-gym:NAME?…, hf:OWNER/NAME?…, or a list of these",
        needs=files,
    )
    val_files: Paths = key((), "validation prompts, likewise; null: no validation", needs=files)
    train_batch_size: int = key(1024, "prompts per training step, over all devices", ge=1)
    gen_batch_size: int | None = key(
        None,
        "prompts answered at a time, with algorithm.filter_groups; null: train_batch_size",
        when=When(
            lambda own: root(own).algorithm.filter_groups.enable, "with algorithm.filter_groups.enable=true"
        ),
        ge=1,
    )
    val_batch_size: int | None = key(
        None, "prompts per validation batch; null: all at once", when=_VALIDATES, ge=1
    )
    max_prompt_length: int = key(512, "longest prompt, tokens", ge=1)
    max_response_length: int = key(512, "longest response, tokens", ge=1)
    prompt_key: str = key("prompt", "column that holds the conversation")
    image_key: str = key("images", f"column of images; {_OF_TEXT}")
    video_key: str = key("videos", f"column of videos; {_OF_TEXT}")
    audio_key: str = key("audios", f"column of sounds; {_OF_TEXT}")
    reward_fn_key: str = key("data_source", "column that names the reward function of a row")
    shuffle: bool = key(
        True,
        "a new order of the training prompts in each epoch",
        when=When(
            lambda own: own.sampler.class_name is None,
            "without {sampler.class_name}, which draws the prompts",
        ),
    )
    seed: int = key(
        0, "seed of that order", inherits="trainer.seed", when=beside("shuffle", True, notice=True), ge=0
    )
    filter_overlong_prompts: bool = key(False, "leave out prompts above max_prompt_length")
    truncation: Truncation = key("error", "what to do with a prompt above max_prompt_length; error: stop")
    train_max_samples: int = key(-1, "use the first so many training rows; -1: all", ge=-1)
    val_max_samples: int = key(-1, "use the first so many validation rows; -1: all", when=_VALIDATES, ge=-1)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "further arguments of the tokenizer's chat template")
    sampler: SamplerConfig = SamplerConfig()

    @property
    def lengths(self) -> tuple[str, ...]:
        """The keys here whose sum is the longest sequence."""
        return ("max_prompt_length", "max_response_length")

    @property
    def prompts_at_a_time(self) -> int:
        """Prompts per generation batch."""
        return self.gen_batch_size or self.train_batch_size
