"""`custom_reward_function` and `reward_model`: a reward function of the user's own, and a trained model that
scores responses in place of functions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tandem.config.batching import BY_SAMPLES, BY_TOKENS, Batching
from tandem.config.dynamic_sampling import OverlongBufferConfig
from tandem.config.fsdp import FORWARD_ALONE, FSDPConfig
from tandem.config.model import LEARNING, BackboneConfig
from tandem.config.needs import CODE_FILES, holds_longest, model_folder, module_or_file
from tandem.config.section import NOT_TRAINED, AsTuple, LocalPath, Section, When, beside, key, section
from tandem.config.view import path, root
from tandem.errors import ConfigError

_OWN = When(lambda own: own.path is not None, "with {path}")
_SERVER = When(lambda own: own.url is not None, "with {url}", notice=True)
_MODEL = beside("enable", True, notice=True)


class RewardTerm(BaseModel):
    """One of several reward functions.

    Attributes:
        name: the function's.
        label: the name of its metric; None: the function's.
        path: Python file or module with it; None: `custom_reward_function.path`.
        weight: of its score in the sum.
        reward_kwargs: further arguments.
    """

    model_config = Section.model_config

    name: str
    label: str | None = None
    path: LocalPath | None = None
    weight: float = 1.0
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)


def _term_files(own: Any, name: str) -> Iterator[ConfigError]:
    """Each function is somewhere."""
    for term in getattr(own, name):
        file = term.path or own.path
        if file is None:
            yield ConfigError("has no path", got=term.name, remedy=f"add path: …, or set {path(own, 'path')}")
        elif file.endswith(CODE_FILES) and not os.path.isfile(file):
            yield ConfigError("no such file", got=file, remedy="check the path")


class CustomRewardConfig(Section):
    """Replaces the built-in reward functions for every data source."""

    path: LocalPath | None = key(
        None, "Python file or module with it; null: built-in, by data source", needs=module_or_file
    )
    name: str = key("compute_score", "the function's name", when=_OWN)
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function", when=_OWN)
    terms: Annotated[tuple[RewardTerm, ...], AsTuple] = key(
        (),
        "several functions, whose weighted sum is the reward: [{name: …, label: …, path: …, "
        "weight: 1.0, reward_kwargs: {}}, …]; unless given, path is as above",
        needs=_term_files,
    )

    @property
    def given(self) -> bool:
        """Whether the user names a function of their own."""
        return self.path is not None or bool(self.terms)


class SandboxConfig(Section):
    """The programs that a reward runs on tests: where, and with what limits."""

    url: str | None = key(
        None, "server that speaks SandboxFusion's protocol and runs them; null: a sandbox on this machine"
    )
    timeout: float = key(10.0, "seconds for a program on one test", gt=0)
    memory_limit_mb: int = key(1024, "MiB of memory for each of a program's processes", ge=128)
    max_concurrent: int = key(64, "programs that the server is asked to run at a time", when=_SERVER, ge=1)


class RewardConfig(Section):
    """The calls of reward functions: processes, limits, and what becomes of a failed one."""

    num_workers: int | None = key(
        None,
        "processes that call reward functions; null: as many as cores, 8 at most; 0: none, the functions are "
        "called without limits where samples are collected",
        ge=0,
    )
    timeout: float = key(300.0, "seconds for one call, after which its process is ended", gt=0)
    retries: int = key(0, "further calls for a sample whose call failed", ge=0)
    max_growth_mb: int | None = key(
        1024, "MiB of growth at which a process is replaced, once its call has ended; null: any", ge=1
    )
    on_error: Literal["raise", "zero", "drop"] = key(
        "raise",
        "a failed score ends the run, counts as 0, or (in training) leaves its sample out of the batch",
    )
    sandbox: SandboxConfig = SandboxConfig()


class RewardBackboneConfig(BackboneConfig):
    """The reward model's backbone and head; it reads the policy's tokens."""

    path: LocalPath = key(
        "",
        "Hugging Face folder of a sequence classifier with one label; needed with reward_model.enable",
        needs=model_folder("config.json"),
    )


def _one_source(own: Any, name: str) -> Iterator[ConfigError]:
    """With a reward model there is one, and no second source of rewards."""
    if not own.enable:
        return
    if not own.model.path:
        yield ConfigError(
            "missing",
            field=path(own.model, "path"),
            expected="a Hugging Face folder of a sequence classifier with one label",
            remedy=f"add {path(own.model, 'path')}=…, or set {path(own, name)}=false",
        )
    if root(own).custom_reward_function.given:
        yield ConfigError(
            "a second source of rewards, beside custom_reward_function.path",
            remedy=f"set {path(own, name)}=false, or remove custom_reward_function.path",
        )


class RewardModelConfig(Section):
    """The reward model; it only computes."""

    enable: bool = key(False, "score responses with this model, not with reward functions", needs=_one_source)
    model: RewardBackboneConfig = section(
        RewardBackboneConfig(), when=_MODEL, below=dict.fromkeys(LEARNING, NOT_TRAINED)
    )
    use_dynamic_bsz: bool = key(
        False, "cut micro-batches by tokens, not by samples", inherits="critic.use_dynamic_bsz", when=_MODEL
    )
    ulysses_sequence_parallel_size: int = key(1, "devices that share one sequence", when=_MODEL, ge=1)
    forward_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch and device; null: the whole share", when=(_MODEL, BY_SAMPLES), ge=1
    )
    forward_max_token_len_per_gpu: int = key(
        32768,
        "tokens per micro-batch and device, with use_dynamic_bsz",
        inherits="critic.forward_max_token_len_per_gpu",
        when=(_MODEL, BY_TOKENS),
        needs=holds_longest,
        ge=1,
    )
    fsdp_config: FSDPConfig = section(FSDPConfig(), when=_MODEL, below=FORWARD_ALONE)
    overlong_buffer: OverlongBufferConfig = section(
        OverlongBufferConfig(), when=beside("overlong_buffer.enable", True)
    )

    @property
    def forward_batching(self) -> Batching:
        return Batching.of(
            dynamic=self.use_dynamic_bsz,
            samples=self.forward_micro_batch_size_per_gpu,
            tokens=self.forward_max_token_len_per_gpu,
        )
