"""Sections of `tandem sft` that differ from those of `tandem train`."""

from __future__ import annotations

from typing import Annotated, Any

from tandem.config.batching import Batching
from tandem.config.data import Truncation
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import ModelConfig
from tandem.config.optim import OptimConfig
from tandem.config.section import OneOf, Paths, Section, key
from tandem.config.trainer import RunConfig

DATA = "data.sft"
ONE_PROCESS = {"ray": "`tandem sft` runs in one process: leave this key out"}


class SFTDataConfig(Section):
    """Demonstrations for supervised fine-tuning."""

    train_files: Paths = key(..., "parquet file of demonstrations, or a list", read_by=DATA)
    val_files: Paths = key((), "parquet file of held-out demonstrations, or a list; null: none", read_by=DATA)
    train_batch_size: int = key(
        256, "sequences per optimizer step, over all devices", read_by="trainer.sft", ge=1
    )
    max_length: int = key(1024, "longest sequence, tokens", read_by=DATA, ge=1)
    truncation: Truncation = key(
        "error", "what to do with a sequence above max_length; error: stop", read_by=DATA
    )
    prompt_key: str = key("prompt", "column of the prompt, where there is no messages column", read_by=DATA)
    response_key: str = key("response", "column of the response to it", read_by=DATA)
    messages_key: str = key(
        "messages", "column of whole conversations; assistant turns are learned", read_by=DATA
    )
    shuffle: bool = key(True, "a new order of the rows in each epoch", read_by=DATA)
    seed: int = key(0, "seed of that order", read_by=DATA, inherits="trainer.seed", ge=0)
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "further arguments of the tokenizer's chat template", read_by=DATA
    )


class SFTRunConfig(RunConfig):
    """A supervised run."""

    backend: Annotated[str, OneOf(("auto", "local"), absent=ONE_PROCESS)] = key(
        "auto", "both: in this process", read_by="config"
    )
    total_epochs: int = key(1, "passes over the training data", read_by="trainer.sft", ge=1)


class SFTConfig(Section):
    """The whole config of `tandem sft`."""

    data: SFTDataConfig
    model: ModelConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    fsdp_config: FSDPConfig = FSDPConfig()
    micro_batch_size_per_gpu: int | None = key(
        None, "sequences per micro-batch and device; null: the whole share", read_by="trainer.sft", ge=1
    )
    use_dynamic_bsz: bool = key(True, "cut micro-batches by tokens, not by sequences", read_by="trainer.sft")
    max_token_len_per_gpu: int = key(
        16384, "tokens per micro-batch and device, with use_dynamic_bsz", read_by="trainer.sft", ge=1
    )
    trainer: SFTRunConfig = SFTRunConfig()

    @property
    def train_batching(self) -> Batching:
        return Batching.of(
            dynamic=self.use_dynamic_bsz,
            samples=self.micro_batch_size_per_gpu,
            tokens=self.max_token_len_per_gpu,
        )
