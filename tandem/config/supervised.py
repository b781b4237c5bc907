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
    """The training and validation examples of a supervised run.

    Attributes:
        train_files: Parquet or .jsonl file of training data, or a list of such files.
        val_files: Parquet or .jsonl file of held-out data, or a list of such files. null: none.
        train_batch_size: Rows per optimizer step, over all devices. A row is a sequence, or a pair of
            sequences.
        max_length: Longest sequence, in tokens.
        truncation: What to do with a sequence that is longer than max_length. error: stop with an error.
            left, right, middle: cut tokens off its beginning, its end or out of its middle.
        prompt_key: Column of prompts, if the responses do not contain the whole conversation.
        shuffle: Shuffle the rows in each epoch.
        seed: Seed of the shuffle.
        apply_chat_template_kwargs: Additional arguments of the tokenizer's chat template: {name: value, …}.
        filter_overlong_prompts_workers: Processes that check, filter and tokenize data files larger than 32
            MiB. null: one per CPU core.
        cache_dir: Folder that caches the result of reading such large files. Entries that are unused for 30
            days are deleted.
    """

    train_files: Paths = key(..., needs=files)
    val_files: Paths = key((), needs=files, resumed="reported")
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
        """The keys of this section whose values sum to the maximum number of tokens in a row."""
        return ("max_length",)


class SupervisedRunConfig(RunConfig):
    """The settings of a supervised run.

    Attributes:
        total_epochs: Number of passes over the training data.
    """

    total_epochs: int = key(1, ge=1)


class SupervisedConfig(Section):
    """The config keys that `tandem sft` and `tandem rm` share.

    Attributes:
        micro_batch_size_per_gpu: Rows per micro-batch and device. null: all rows that are on the device.
        use_dynamic_bsz: Limit micro-batches by their number of tokens instead of their number of rows.
        max_token_len_per_gpu: Tokens per micro-batch and device, with use_dynamic_bsz=true.
        ulysses_sequence_parallel_size: Number of devices that share the computation of one sequence (Ulysses
            sequence parallelism).
    """

    data: SupervisedDataConfig
    model: ModelConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    fsdp_config: FSDPConfig = section(FSDPConfig(), below={"optimizer_offload": OPTIMIZER_HAS_STATE_HERE})
    micro_batch_size_per_gpu: int | None = key(None, when=BY_SAMPLES, ge=1, resumed="reported")
    use_dynamic_bsz: bool = key(True, resumed="reported")
    max_token_len_per_gpu: int = key(16384, when=BY_TOKENS, needs=holds_longest, ge=1, resumed="reported")
    ulysses_sequence_parallel_size: int = key(1, ge=1, resumed="reported")
    trainer: SupervisedRunConfig = SupervisedRunConfig()

    @property
    def train_batching(self) -> Batching:
        return Batching.of(self.use_dynamic_bsz, self.micro_batch_size_per_gpu, self.max_token_len_per_gpu)


class SFTDataConfig(SupervisedDataConfig):
    """Example responses for supervised fine-tuning.

    Attributes:
        response_key: Column of the responses to the prompts, as text or messages. If the data has no such
            column, `completion` is used.
        messages_key: Column of whole conversations. The model learns the assistant's turns.
        text_key: Column of texts that the model learns completely. This column is used if the data has
            neither messages nor prompts with responses.
        tools_key: Column of tools for the chat template, if the data has one: a list of JSON schemas, or such
            a list as JSON text. null: none.
    """

    response_key: str = "response"
    messages_key: str = "messages"
    text_key: str = "text"
    tools_key: str | None = "tools"


class SFTConfig(SupervisedConfig):
    """The whole config of `tandem sft`."""

    data: SFTDataConfig


class RMDataConfig(SupervisedDataConfig):
    """Preference data for training a reward model.

    Attributes:
        chosen_key: Column of the better response: a conversation, or a text that follows the prompt.
        rejected_key: Column of the worse response: a conversation, or a text that follows the prompt.
        margin_key: Column of the margin by which the better response should score higher. null: no margin.
    """

    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None

    @property
    def lengths(self) -> tuple[str, ...]:
        return ("max_length", "max_length")  # a pair is never split


class RMConfig(SupervisedConfig):
    """The whole config of `tandem rm`.

    Attributes:
        center_rewards_coefficient: Weight of (chosen reward + rejected reward)² in the loss, which keeps the
            rewards centered around zero.
    """

    data: RMDataConfig
    center_rewards_coefficient: float = key(0.0, ge=0)
