"""`custom_reward_function` and `reward_model`: reward functions of the user's own, and trained models that
score responses, in place of functions or beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from tandem.config.batching import BY_SAMPLES, BY_TOKENS, Batching
from tandem.config.cluster import ByName
from tandem.config.dynamic_sampling import OverlongBufferConfig
from tandem.config.fsdp import FORWARD_ALONE, FSDPConfig
from tandem.config.model import LEARNING, BackboneConfig
from tandem.config.needs import (
    CODE_FILES,
    Check,
    ModelFolder,
    holds_longest,
    module_or_file,
    names,
    not_a_model,
    own_code,
)
from tandem.config.section import NOT_TRAINED, AsTuple, LocalPath, Section, When, beside, key, section
from tandem.config.view import path, root
from tandem.errors import ConfigError

_OWN = When(lambda own: own.path is not None, "with {path}")
FUNCTIONS = "rule"
"""What the data sources' own rewards are called among the parts of a reward."""
_SERVER = When(lambda own: own.url is not None, "with {url}", notice=True)
_MODEL = beside("enable", True, notice=True)
_BESIDE_MODELS = When(lambda own: root(own).reward_model.enable, "with reward_model.enable=true")


class RewardTerm(Section):
    """One of several reward functions.

    Attributes:
        name: the function's.
        label: the name of its metric; None: the function's.
        path: Python file or module with it; None: `custom_reward_function.path`.
        weight: of its score in the sum.
        reward_kwargs: further arguments.
    """

    name: str
    label: str | None = None
    path: LocalPath | None = None
    weight: float = 1.0
    reward_kwargs: dict[str, Any] = key({})


def _term_files(own: Any, name: str) -> Iterator[ConfigError]:
    """Each function is somewhere."""
    for term in getattr(own, name):
        file = term.path or own.path
        if file is None:
            yield ConfigError("has no path", got=term.name, remedy=f"add path: …, or set {path(own, 'path')}")
        elif file.endswith(CODE_FILES) and not os.path.isfile(file):
            yield ConfigError("no such file", got=file, remedy="check the path")


class CustomRewardConfig(Section):
    """Replaces the built-in reward functions for every data source.

    Attributes:
        path: Python file or module with it; null: built-in, by data source
        name: the function's name
        reward_kwargs: further arguments of the function
        terms: several functions, whose weighted sum is the reward: [{name: …, label: …, path: …, weight: 1.0,
            reward_kwargs: {}}, …]; unless given, path is as above
    """

    path: LocalPath | None = key(None, needs=module_or_file)
    name: str = key("compute_score", when=_OWN)
    reward_kwargs: dict[str, Any] = key({}, when=_OWN)
    terms: Annotated[tuple[RewardTerm, ...], AsTuple] = key((), needs=_term_files)

    @property
    def given(self) -> bool:
        """Whether the user names a function of their own."""
        return self.path is not None or bool(self.terms)


class SandboxConfig(Section):
    """The programs that a reward runs on tests: where, and with what limits.

    Attributes:
        url: server that speaks SandboxFusion's protocol and runs them; null: a sandbox on this machine
        timeout: seconds for a program on one test
        memory_limit_mb: MiB of memory for each of a program's processes
        max_concurrent: programs that the server is asked to run at a time
    """

    url: str | None = None
    timeout: float = key(10.0, gt=0)
    memory_limit_mb: int = key(1024, ge=128)
    max_concurrent: int = key(64, when=_SERVER, ge=1)


class RewardConfig(Section):
    """The calls of reward functions: processes, limits, and what becomes of a failed one.

    Attributes:
        num_workers: processes that call reward functions; null: as many as cores, 8 at most; 0: none, the
            functions are called without limits where samples are collected
        timeout: seconds for one call, after which its process is ended
        retries: further calls for a sample whose call failed
        max_growth_mb: MiB of growth at which a process is replaced, once its call has ended; null: any
        on_error: a failed score ends the run, counts as 0, or (in training) leaves its sample out of the
            batch
    """

    num_workers: int | None = key(None, ge=0)
    timeout: float = key(300.0, gt=0)
    retries: int = key(0, ge=0)
    max_growth_mb: int | None = key(1024, ge=1)
    on_error: Literal["raise", "zero", "drop"] = "raise"
    sandbox: SandboxConfig = SandboxConfig()


def _sums(own: Any, name: str) -> Iterator[ConfigError]:
    """Where a function makes the reward of the parts' scores, nothing else does."""
    functions, models = root(own).custom_reward_function, root(own).reward_model
    weights = {"custom_reward_function.terms": [term.weight for term in functions.terms]}
    weights["reward_model.models"] = [term.weight for term in models.models.values()]
    weights[path(own, "weight")] = [] if own.weight is None else [own.weight]
    weighing = [field for field, given in weights.items() if any(weight != 1 for weight in given)]
    steps = [term for term in models.scorers.values() if term.step_separator is not None]
    if own.combine is not None and (weighing or steps):
        yield ConfigError(
            "is given each part's score, so that weights have no effect"
            if weighing
            else "makes one number of a response, so that the scores of its steps would be lost",
            got=f"{own.combine}, with {' and '.join(weighing) or 'step_separator'}",
            remedy="weigh the scores in the function" if weighing else f"remove {path(own, name)}",
        )


class CombinedRewardConfig(RewardConfig):
    """Reward functions and reward models together.

    Attributes:
        weight: weight of what reward functions say beside reward models; null: 1 with custom_reward_function,
            else none are called
        combine: function of your own, file.py:function, that makes the reward out of a mapping of the parts'
            scores by name; null: their weighted sum
    """

    weight: float | None = key(None, when=_BESIDE_MODELS)
    combine: str | None = key(None, needs=(own_code, _sums))


class ScorerTerm(Section):
    """One of several reward models.

    Attributes:
        path: Hugging Face folder of a sequence or token classifier.
        weight: of its score in the sum; 0: it is only measured.
        tokenizer_path: folder of the tokenizer that it reads with; None: its own, where its folder has one.
        custom_chat_template: Jinja template of the conversations that it reads; None: that tokenizer's.
        normalize: whether its scores count less their mean and over their standard deviation so far.
        step_separator: the text that ends a step of a response; each step is scored where it ends. None: a
            response is scored as a whole.
        step_score: what the response's score is of its steps' scores.
    """

    path: LocalPath
    weight: float = 1.0
    tokenizer_path: LocalPath | None = None
    custom_chat_template: str | None = None
    normalize: bool = False
    step_separator: str | None = key(None, min_length=1)
    step_score: Literal["sum", "min", "last"] = "sum"


class RewardBackboneConfig(BackboneConfig):
    """The reward models' backbone and head.

    Attributes:
        path: Hugging Face folder of a sequence classifier with one label; several: reward_model.models
    """

    path: LocalPath = key("", needs=ModelFolder("config.json"))


_NO_MODEL = Check(
    lambda own, path: own.enable and not path and not own.models,
    "missing",
    field="model.path",
    expected="a Hugging Face folder of a sequence classifier with one label",
    remedy="add {}=…, or set {enable}=false",
)
_TWO_MODELS = Check(
    lambda own, path: own.enable and path and own.models,
    "named beside {models}",
    field="model.path",
    expected="one of the two, {} or {models}",
    remedy="name it in {models}",
)


def _scorers(own: Any, name: str) -> Iterator[ConfigError]:
    """Folders are there, and options go together."""
    functions = root(own).custom_reward_function
    taken = {term.label or term.name for term in functions.terms} | {functions.name, FUNCTIONS}
    for label, term in getattr(own, name).items():
        field = f"{path(own, name)}.{label}"
        yield from not_a_model(term.path, "config.json", f"{field}.path")
        yield from not_a_model(term.tokenizer_path, "tokenizer_config.json", f"{field}.tokenizer_path")
        steps = term.step_separator is not None
        if steps and term.normalize:
            yield ConfigError(
                "scores of steps are not normalised",
                field=f"{field}.normalize",
                got="true",
                remedy="remove it",
            )
        if not steps and term.step_score != "sum":
            yield ConfigError(
                "has no effect",
                field=f"{field}.step_score",
                got=term.step_score,
                expected="set only with step_separator",
                remedy="set that too, or remove this entry",
            )
        if label in taken and root(own).calls_functions:
            yield ConfigError("the name of a reward function", field=field, remedy="give it another name")


class RewardModelConfig(Section):
    """The reward models; they only compute. What is said here holds for each of them.

    Attributes:
        enable: score responses with reward models, in place of reward functions or beside them
        models: several reward models: {name: {path: …, weight: 1.0, tokenizer_path: …, custom_chat_template:
            …, normalize: false, step_separator: …, step_score: sum}, …}; each is placed as reward_model.NAME,
            or with reward_model
        use_dynamic_bsz: cut micro-batches by tokens, not by samples
        ulysses_sequence_parallel_size: devices that share one sequence
        forward_micro_batch_size_per_gpu: samples per micro-batch and device; null: the whole share
        forward_max_token_len_per_gpu: tokens per micro-batch and device, with use_dynamic_bsz
    """

    enable: bool = key(False, needs=(_NO_MODEL, _TWO_MODELS))
    models: Annotated[dict[str, ScorerTerm], ByName] = key(
        {}, when=beside("enable", True), needs=(names, _scorers)
    )
    model: RewardBackboneConfig = section(
        RewardBackboneConfig(), when=_MODEL, below=dict.fromkeys(LEARNING, NOT_TRAINED)
    )
    use_dynamic_bsz: bool = key(False, inherits="critic.use_dynamic_bsz", when=_MODEL, resumed="told")
    ulysses_sequence_parallel_size: int = key(1, when=_MODEL, ge=1, resumed="told")
    forward_micro_batch_size_per_gpu: int | None = key(None, when=(_MODEL, BY_SAMPLES), ge=1, resumed="told")
    forward_max_token_len_per_gpu: int = key(
        32768,
        inherits="critic.forward_max_token_len_per_gpu",
        when=(_MODEL, BY_TOKENS),
        needs=holds_longest,
        ge=1,
        resumed="told",
    )
    fsdp_config: FSDPConfig = section(FSDPConfig(), when=_MODEL, below=FORWARD_ALONE)
    overlong_buffer: OverlongBufferConfig = section(
        OverlongBufferConfig(), when=beside("overlong_buffer.enable", True)
    )

    @property
    def scorers(self) -> Mapping[str, ScorerTerm]:
        """The reward models by role."""
        if not self.enable:
            return {}
        several = {f"reward_model.{name}": term for name, term in self.models.items()}
        return several or {"reward_model": ScorerTerm(path=self.model.path)}

    @property
    def forward_batching(self) -> Batching:
        return Batching.of(
            self.use_dynamic_bsz, self.forward_micro_batch_size_per_gpu, self.forward_max_token_len_per_gpu
        )
