"""`data`: prompt files and how they are cut into batches."""

from __future__ import annotations

from typing import Any, Literal

from tandem.config.dynamic_sampling import SamplerConfig
from tandem.config.section import Paths, Section, key

Truncation = Literal["error", "left", "right", "middle"]


class DataConfig(Section):
    """Prompts for training and validation (parquet in the users' format)."""

    train_files: Paths = key(..., "parquet file of training prompts, or a list", read_by="data.prompts")
    val_files: Paths = key(
        (), "parquet file of validation prompts, or a list; null: no validation", read_by="data.prompts"
    )
    train_batch_size: int = key(
        1024, "prompts per training step, over all devices", read_by="data.loader", ge=1
    )
    gen_batch_size: int | None = key(
        None,
        "prompts answered at a time, with algorithm.filter_groups; null: train_batch_size",
        read_by="config",
        ge=1,
    )
    val_batch_size: int | None = key(
        None, "prompts per validation batch; null: all at once", read_by="trainer.gathering", ge=1
    )
    max_prompt_length: int = key(512, "longest prompt, tokens", read_by="data.prompts", ge=1)
    max_response_length: int = key(512, "longest response, tokens", read_by="trainer.ppo", ge=1)
    prompt_key: str = key("prompt", "column that holds the conversation", read_by="data.prompts")
    reward_fn_key: str = key(
        "data_source", "column that names the reward function of a row", read_by="data.prompts"
    )
    shuffle: bool = key(True, "a new order of the training prompts in each epoch", read_by="data.loader")
    seed: int = key(0, "seed of that order", read_by="data.loader", inherits="trainer.seed", ge=0)
    filter_overlong_prompts: bool = key(
        False, "leave out prompts above max_prompt_length", read_by="data.prompts"
    )
    truncation: Truncation = key(
        "error", "what to do with a prompt above max_prompt_length; error: stop", read_by="data.prompts"
    )
    train_max_samples: int = key(
        -1, "use the first so many training rows; -1: all", read_by="data.prompts", ge=-1
    )
    val_max_samples: int = key(
        -1, "use the first so many validation rows; -1: all", read_by="data.prompts", ge=-1
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "further arguments of the tokenizer's chat template", read_by="data.prompts"
    )
    sampler: SamplerConfig = SamplerConfig()

    @property
    def prompts_at_a_time(self) -> int:
        """Prompts per generation batch."""
        return self.gen_batch_size or self.train_batch_size
