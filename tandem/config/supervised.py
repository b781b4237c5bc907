"""The configs of `tandem sft` and `tandem rm`."""

from __future__ import annotations

from typing import Any

from tandem.config.batching import BY_SAMPLES, BY_TOKENS, Batching
from tandem.config.data import CACHE_DIR, WORKERS, Truncation
from tandem.config.fsdp import OPTIMIZER_HAS_STATE_HERE, FSDPConfig
from tandem.config.model import ModelConfig
from tandem.config.needs import files, holds_longest
from tandem.config.optim import OptimConfig
from tandem.config.section import LocalPath, Paths, Section, beside, key, section
from tandem.config.trainer import RunConfig


class SupervisedDataConfig(Section):
    """Examples to learn from.

    Attributes:
        train_files: parquet or .jsonl file of training data, or a list
        val_files: parquet or .jsonl file of held-out data, or a list; null: none
        train_batch_size: rows (sequences, or pairs of them) per optimizer step, over all devices
        max_length: longest sequence, tokens
        truncation: what to do with a sequence above max_length; error: stop
        prompt_key: column of prompts, where answers do not hold the whole conversation
        shuffle: a new order of the rows in each epoch
        seed: seed of that order
        apply_chat_template_kwargs: further arguments of the tokenizer's chat template
        filter_overlong_prompts_workers: processes that check, filter and tokenise files of more than 32 MiB;
            null: one for each processor
        cache_dir: folder of what was made of such files; entries unused for 30 days are removed
    """

    train_files: Paths = key(..., needs=files)
    val_files: Paths = key((), needs=files, resumed="told")
    train_batch_size: int = key(256, ge=1)
    max_length: int = key(1024, ge=1)
    truncation: Truncation = "error"
    prompt_key: str = "prompt"
    shuffle: bool = True
    seed: int = key(0, inherits="trainer.seed", when=beside("shuffle", True, notice=True), ge=0)
    apply_chat_template_kwargs: dict[str, Any] = key({})
    filter_overlong_prompts_workers: int | None = WORKERS
    cache_dir: LocalPath = CACHE_DIR

    @property
    def lengths(self) -> tuple[str, ...]:
        """The keys here whose sum is the most tokens of a row."""
        return ("max_length",)


class SupervisedRunConfig(RunConfig):
    """A supervised run.

    Attributes:
        total_epochs: passes over the training data
    """

    total_epochs: int = key(1, ge=1)


class SupervisedConfig(Section):
    """The whole config, but for the columns of the data.

    Attributes:
        micro_batch_size_per_gpu: rows per micro-batch and device; null: the whole share
        use_dynamic_bsz: cut micro-batches by tokens, not by rows
        max_token_len_per_gpu: tokens per micro-batch and device, with use_dynamic_bsz
        ulysses_sequence_parallel_size: devices that share one sequence
    """

    data: SupervisedDataConfig
    model: ModelConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    fsdp_config: FSDPConfig = section(FSDPConfig(), below={"optimizer_offload": OPTIMIZER_HAS_STATE_HERE})
    micro_batch_size_per_gpu: int | None = key(None, when=BY_SAMPLES, ge=1, resumed="told")
    use_dynamic_bsz: bool = key(True, resumed="told")
    max_token_len_per_gpu: int = key(16384, when=BY_TOKENS, needs=holds_longest, ge=1, resumed="told")
    ulysses_sequence_parallel_size: int = key(1, ge=1, resumed="told")
    trainer: SupervisedRunConfig = SupervisedRunConfig()

    @property
    def train_batching(self) -> Batching:
        return Batching.of(self.use_dynamic_bsz, self.micro_batch_size_per_gpu, self.max_token_len_per_gpu)


class SFTDataConfig(SupervisedDataConfig):
    """Demonstrations for supervised fine-tuning.

    Attributes:
        response_key: column of the response to the prompt, text or messages; without it, `completion`
        messages_key: column of whole conversations; assistant turns are learned
        text_key: column of texts that are learned whole, where nothing else is there
        tools_key: column of tools for the chat template, if there is one: a list of JSON schemas, or that as
            JSON; null: none
    """

    response_key: str = "response"
    messages_key: str = "messages"
    text_key: str = "text"
    tools_key: str | None = "tools"


class SFTConfig(SupervisedConfig):
    """The whole config of `tandem sft`."""

    data: SFTDataConfig


class RMDataConfig(SupervisedDataConfig):
    """Preferences to learn a reward from.

    Attributes:
        chosen_key: column of the better answer: a conversation, or text that follows the prompt
        rejected_key: column of the worse answer, in the same form
        margin_key: column of numbers by which the better answer is to score higher; null: by any
    """

    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None

    @property
    def lengths(self) -> tuple[str, ...]:
        return ("max_length", "max_length")  # a pair is never parted


class RMConfig(SupervisedConfig):
    """The whole config of `tandem rm`.

    Attributes:
        center_rewards_coefficient: weight of (chosen reward + rejected reward) squared in the loss, which
            keeps rewards around zero
    """

    data: RMDataConfig
    center_rewards_coefficient: float = key(0.0, ge=0)
