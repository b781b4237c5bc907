"""The worker that reads, checks and tokenizes data files, in a process parallel to the controller."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig
from tandem.config.supervised import SupervisedDataConfig
from tandem.data.chat import ChatTemplate
from tandem.data.curriculum import DrawnBatches, load_sampler
from tandem.data.encoder import Encoder
from tandem.data.forms import PromptForm
from tandem.data.loader import BatchLoader, Dataset, EveryRow
from tandem.data.mixture import EpochOrder, MixedOrder, Order, Stretch
from tandem.data.own import OwnPrompts, load_dataset
from tandem.data.prompts import PromptDataset, by_name
from tandem.data.truncation import Limit
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto
from tandem.rewards.signatures import VERLS, Reads
from tandem.runtime import Dispatch, register
from tandem.workers.base import TimedWorker


@dataclass(frozen=True, slots=True)
class DataFacts:
    """The properties of the data that the controller needs.

    Attributes:
        rows: The number of training prompts.
        val_batches: The number of validation batches; 0 without validation data.
        digest: A digest of all training prompts, which depends on their order.
        sources: The data sources of training and validation data, sorted.
        longest_prompt: The length in tokens of the longest prompt in training and validation data; 0 if the
            rows are examples with responses.
    """

    rows: int
    val_batches: int
    digest: str
    sources: tuple[str, ...]
    longest_prompt: int = 0


@dataclass(frozen=True)
class Read:
    """The contents of data files after reading, checking and tokenizing.

    Attributes:
        train: The training rows.
        batches: The batches of the training rows.
        validation: The batches of the validation rows, if there are any.
        sources: The data sources of training and validation data.
        longest_prompt: The length of the longest training or validation prompt, in tokens.
    """

    train: Dataset
    batches: BatchLoader | DrawnBatches
    validation: EveryRow | None
    sources: frozenset[str] = frozenset()
    longest_prompt: int = 0

    @property
    def facts(self) -> DataFacts:
        rows, held_out = len(self.train), len(self.validation or ())
        return DataFacts(rows, held_out, self.digest(rows), tuple(sorted(self.sources)), self.longest_prompt)

    def digest(self, rows: int) -> str:
        """Return a digest of the first `rows` training rows."""
        return hashlib.blake2b(self.train.digests[:rows].tobytes(), digest_size=16).hexdigest()


def read_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, reads: Reads = VERLS) -> Read:
    """Read the prompts of a reinforcement learning run.

    Args:
        config: The resolved data section.
        tokenizer: The tokenizer, which formats and tokenizes the prompts.
        reads: The columns that the reward reads.

    Raises:
        DataError: Something is wrong with the files or their rows, or there are too few rows for a batch.
    """
    train = prompt_dataset(config, tokenizer, config.train_files, config.train_max_samples, reads)
    sources, held_out, longest = set(train.data_sources), None, train.longest
    if config.val_files:
        validation = prompt_dataset(config, tokenizer, config.val_files, config.val_max_samples, reads)
        sources |= set(validation.data_sources)
        longest = max(longest, validation.longest)
        held_out = EveryRow(validation, config.val_batch_size)
    drawn = _sampler_batches(config, train)
    field = "data.gen_batch_size" if config.gen_batch_size else "data.train_batch_size"
    weights, shuffle, seed = config.mixture, config.shuffle, config.seed
    order: Order = EpochOrder(shuffle=shuffle, seed=seed)
    if weights and drawn is None:
        places = train.places_of_sources(tuple(weights))
        order = MixedOrder(weights, places, shuffle=shuffle, seed=seed)
    made = drawn or BatchLoader(train, config.prompts_at_a_time, order, field=field)
    return Read(train, made, held_out, frozenset(sources), longest)


def read_examples(config: SupervisedDataConfig, read: Callable[[tuple[str, ...]], Dataset]) -> Read:
    """Read the examples of a supervised run.

    Args:
        config: The resolved data section.
        read: A function that creates a dataset from a tuple of file paths.

    Raises:
        DataError: Something is wrong with the files or their rows, or there are too few rows for a batch.
    """
    train = read(config.train_files)
    held_out = EveryRow(read(config.val_files), config.train_batch_size) if config.val_files else None
    order = EpochOrder(shuffle=config.shuffle, seed=config.seed)
    return Read(train, BatchLoader(train, config.train_batch_size, order), held_out)


class DatasetWorker(TimedWorker):
    """The worker that holds training and validation rows.

    A batch depends only on its number. So a batch can be requested before it is needed, and again after a
    resume.

    Args:
        read: A function that reads the data. It runs in the worker's process.
        run: The run folder.
    """

    def __init__(self, read: Callable[[], Read], run: RunFolder) -> None:
        self._read = read()
        self.train, self.validation = self._read.batches, self._read.validation
        super().__init__(run, "data")  # last, so that the run folder does not change if the data are invalid

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def describe(self) -> DataFacts:
        return self._read.facts

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def digest(self, rows: int) -> str:
        """Return a digest of the first `rows` training rows."""
        return self._read.digest(rows)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def grow(self, stretches: tuple[Stretch, ...]) -> None:
        """Set how many rows the data had in earlier epochs; see `BatchOrder`."""
        assert isinstance(self.train, BatchLoader), "a sampler draws from all rows"
        self.train.stretches = stretches

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def train_batch(self, number: int) -> DataProto:
        """Return the training batch with this number, counted from 0."""
        with self.timeline.phase("data"):
            return self.train.batch(number)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def val_batch(self, number: int) -> DataProto:
        """Return the validation batch with this number, counted from 0."""
        assert self.validation is not None, "there is no validation data"
        with self.timeline.phase("data"):
            return self.validation[number]


class DataWorker(DatasetWorker):
    """The worker that reads prompts and returns training batches by number.

    Args:
        config: The resolved data section.
        tokenizer: The tokenizer, which formats and tokenizes the prompts.
        run: The run folder.
        reads: The columns that the reward reads.

    Raises:
        DataError: Something is wrong with the files or their rows, or there are too few rows for a batch.
    """

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, run: RunFolder, reads: Reads = VERLS
    ) -> None:
        super().__init__(partial(read_prompts, config, tokenizer, reads), run)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def recall(self, uids: tuple[str, ...]) -> DataProto:
        """Return prompts from earlier training batches; see `PromptDataset.recall`."""
        assert isinstance(self._read.train, PromptDataset)
        with self.timeline.phase("data"):
            return self._read.train.recall(uids)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def observe(self, batch: DataProto) -> None:
        """Pass the scores of some prompts' responses to the sampler; see `DrawnBatches.observe`."""
        self._sampler_batches().observe(batch)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sampler_state(self) -> dict[str, Any]:
        """Return the sampler's state for `load_sampler_state`."""
        return self._sampler_batches().state_dict()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def load_sampler_state(self, state: dict[str, Any]) -> None:
        """Restore the sampler's state, a result of `sampler_state`."""
        self._sampler_batches().load_state_dict(state)

    def _sampler_batches(self) -> DrawnBatches:
        assert isinstance(self.train, DrawnBatches), "there is no sampler"
        return self.train


def _sampler_batches(config: DataConfig, prompts: PromptDataset) -> DrawnBatches | None:
    """Return the batches that the config's sampler draws, or None if the config has no sampler."""
    sampler, size = config.sampler, config.prompts_at_a_time
    if sampler.class_name is None:
        return None
    made = load_sampler(
        prompts,
        path=sampler.class_path,
        name=sampler.class_name,
        batch_size=size,
        seed=config.seed,
        kwargs=sampler.kwargs,
        config=config.model_dump(mode="json"),
    )
    return DrawnBatches(prompts, size, made)


def prompt_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    files: tuple[str, ...],
    max_samples: int,
    reads: Reads = VERLS,
) -> PromptDataset:
    form = prompt_form(config, reads)
    if config.custom_cls.path is not None and config.custom_cls.name is not None:
        named = config.custom_cls.path, config.custom_cls.name
        own = load_dataset(*named, files, tokenizer, config.model_dump(mode="json"), max_samples)
        key = "actor_rollout_ref.model.custom_chat_template"
        template = ChatTemplate(tokenizer, config.apply_chat_template_kwargs, key)
        long = config.max_prompt_length, "data.max_prompt_length", config.truncation
        encoder = Encoder(form, tokenizer, template, Limit(*long, config.filter_overlong_prompts))
        return OwnPrompts(own, named[1], encoder, form, by_name=by_name(form, reads.optional))
    return PromptDataset(
        list(files),
        tokenizer,
        form=form,
        optional=reads.optional,
        max_prompt_length=config.max_prompt_length,
        truncation=config.truncation,
        filter_overlong_prompts=config.filter_overlong_prompts,
        max_samples=max_samples,
        chat_template_kwargs=config.apply_chat_template_kwargs,
        workers=config.filter_overlong_prompts_workers,
        cache_dir=config.cache_dir,
    )


def prompt_form(config: DataConfig, reads: Reads) -> PromptForm:
    """Return the settings for converting rows of data files to prompts."""
    return PromptForm(
        prompt_key=config.prompt_key,
        apply_chat_template=config.apply_chat_template,
        system_key=config.system_key,
        tools_key=config.tools_key,
        answer_key=config.answer_key,
        reward_fn_key=config.reward_fn_key,
        needs=tuple(reads.needs),
        media_keys=(config.image_key, config.video_key, config.audio_key),
    )
