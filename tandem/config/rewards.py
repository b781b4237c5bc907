"""The sections `custom_reward_function`, `reward` and `reward_model`.

Responses are scored by reward functions, by trained reward models, or by both.
"""

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

_OWN = When(lambda own: own.path is not None, "if {path} is set")
FUNCTIONS = "rule"
"""The name of the built-in reward functions in metrics and in the function that combines scores."""
_SERVER = When(lambda own: own.url is not None, "if {url} is set", notice=True)
_MODEL = beside("enable", True, notice=True)
_BESIDE_MODELS = When(lambda own: root(own).reward_model.enable, "if reward_model.enable=true")


class RewardTerm(Section):
    """The config of one reward function, if a run has several reward functions.

    Attributes:
        name: the function's name.
        label: the name of its metric; None: the function's name.
        path: the Python file or module of the function; None: `custom_reward_function.path`.
        weight: the weight of the function's score in the sum.
        reward_kwargs: additional arguments of the function.
    """

    name: str
    label: str | None = None
    path: LocalPath | None = None
    weight: float = 1.0
    reward_kwargs: dict[str, Any] = key({})


def _term_files(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the file of each function exists."""
    for term in getattr(own, name):
        file = term.path or own.path
        if file is None:
            yield ConfigError(
                "this function has no path", got=term.name, remedy=f"add path: …, or set {path(own, 'path')}"
            )
        elif file.endswith(CODE_FILES) and not os.path.isfile(file):
            yield ConfigError("this file does not exist", got=file, remedy="check the path")


class CustomRewardConfig(Section):
    """Your own reward functions, which replace the built-in reward functions of all data sources.

    Attributes:
        path: Python file or module that contains the reward function. null: the built-in function of each
            row's data source.
        name: Name of the function.
        reward_kwargs: Additional arguments of the function: {name: value, …}.
        terms: Several functions instead of one: [{name: …, label: …, path: …, weight: 1.0, reward_kwargs:
            {}}, …]. The reward is the sum of their scores, each multiplied by its weight. Without path, a
            function is taken from the path above. Without label, its metric has the function's name.
    """

    path: LocalPath | None = key(None, needs=module_or_file)
    name: str = key("compute_score", when=_OWN)
    reward_kwargs: dict[str, Any] = key({}, when=_OWN)
    terms: Annotated[tuple[RewardTerm, ...], AsTuple] = key((), needs=_term_files)

    @property
    def given(self) -> bool:
        """Whether the user names a reward function."""
        return self.path is not None or bool(self.terms)


class SandboxConfig(Section):
    """The sandbox for the programs that a reward function tests, and its limits.

    Attributes:
        url: Address of a server with SandboxFusion's protocol that runs the programs. null: a sandbox on this
            machine.
        timeout: Seconds that a program may take for one test.
        memory_limit_mb: Memory for each process of a program, in MiB.
        max_concurrent: Maximum number of programs that the server runs at the same time.
    """

    url: str | None = None
    timeout: float = key(10.0, gt=0)
    memory_limit_mb: int = key(1024, ge=128)
    max_concurrent: int = key(64, when=_SERVER, ge=1)


class RewardConfig(Section):
    """The settings for calls of reward functions: processes, limits, and the reaction to failures.

    Attributes:
        num_workers: Number of processes that call reward functions. null: one per CPU core, at most 8. 0: no
            extra processes; the functions are called without limits in the process that collects the samples.
        timeout: Seconds that one call may take. After this time, its process is stopped.
        retries: Number of additional attempts for a sample whose call failed.
        max_growth_mb: Memory growth, in MiB, after which a process is replaced as soon as its current call
            has ended. null: no limit.
        on_error: What happens if a score fails. raise: the run stops. zero: the score is 0. drop: in
            training, the sample is left out of the batch.
    """

    num_workers: int | None = key(None, ge=0)
    timeout: float = key(300.0, gt=0)
    retries: int = key(0, ge=0)
    max_growth_mb: int | None = key(1024, ge=1)
    on_error: Literal["raise", "zero", "drop"] = "raise"
    sandbox: SandboxConfig = SandboxConfig()


def _sums(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that no weights are set if a user-defined function combines the scores."""
    functions, models = root(own).custom_reward_function, root(own).reward_model
    weights = {"custom_reward_function.terms": [term.weight for term in functions.terms]}
    weights["reward_model.models"] = [term.weight for term in models.models.values()]
    weights[path(own, "weight")] = [] if own.weight is None else [own.weight]
    weighing = [field for field, given in weights.items() if any(weight != 1 for weight in given)]
    steps = [term for term in models.scorers.values() if term.step_separator is not None]
    if own.combine is not None and (weighing or steps):
        yield ConfigError(
            "this function receives the score of each part, so that weights have no effect"
            if weighing
            else "this function returns one number per response, so the scores of its steps would be lost",
            got=f"{own.combine}, with {' and '.join(weighing) or 'step_separator'}",
            remedy="apply the weights in the function" if weighing else f"remove {path(own, name)}",
        )


class CombinedRewardConfig(RewardConfig):
    """The settings that combine scores of reward functions and reward models.

    Attributes:
        weight: Weight of the score of the reward functions, if reward models are used too. null: 1 if
            custom_reward_function is set; otherwise no reward functions are called.
        combine: Your own function, as file.py:function, that computes the reward from a mapping of each
            part's name to its score. null: the reward is the weighted sum of the scores.
    """

    weight: float | None = key(None, when=_BESIDE_MODELS)
    combine: str | None = key(None, needs=(own_code, _sums))


class ScorerTerm(Section):
    """The config of one reward model, if a run has several reward models.

    Attributes:
        path: Hugging Face folder of the reward model, a sequence or token classifier.
        weight: the weight of the model's score in the sum; 0: the score is reported but not used.
        tokenizer_path: the folder of the model's tokenizer; None: the tokenizer in the model's folder, if
            there is one.
        custom_chat_template: Jinja template for the model's conversations; None: the template of the
            tokenizer.
        normalize: whether to normalize scores: subtract the mean of all scores so far, and divide by their
            standard deviation.
        step_separator: the text that ends a step of a response. Each step is scored at its end. None: the
            whole response gets one score.
        step_score: how to combine the scores of the steps into the score of the response.
    """

    path: LocalPath
    weight: float = 1.0
    tokenizer_path: LocalPath | None = None
    custom_chat_template: str | None = None
    normalize: bool = False
    step_separator: str | None = key(None, min_length=1)
    step_score: Literal["sum", "min", "last"] = "sum"


class RewardBackboneConfig(BackboneConfig):
    """The backbone and head of the reward models.

    Attributes:
        path: Hugging Face folder of a sequence classifier with one label. For several models, use
            reward_model.models.
    """

    path: LocalPath = key("", needs=ModelFolder("config.json"))


_NO_MODEL = Check(
    lambda own, path: own.enable and not path and not own.models,
    "missing",
    field="model.path",
    expected="a Hugging Face folder of a sequence classifier with one label",
    remedy="add {}=…, or set {enable}=false",
)
_CHANGED_MODELS = Check(
    lambda own, models: models and (own.model.override_config or own.model.resize_embeddings),
    "{model.override_config} and {model.resize_embeddings} do not change these models",
    got="{=}",
    expected="a single model, as {model.path}",
    remedy="remove these keys, and change the folders of the models",
)
_TWO_MODELS = Check(
    lambda own, path: own.enable and path and own.models,
    "set together with {models}",
    field="model.path",
    expected="either {} or {models}",
    remedy="move this model to {models}",
)


def _scorers(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the folders exist and that the options are compatible."""
    functions = root(own).custom_reward_function
    taken = {term.label or term.name for term in functions.terms} | {functions.name, FUNCTIONS}
    for label, term in getattr(own, name).items():
        field = f"{path(own, name)}.{label}"
        yield from not_a_model(term.path, "config.json", f"{field}.path")
        yield from not_a_model(term.tokenizer_path, "tokenizer_config.json", f"{field}.tokenizer_path")
        steps = term.step_separator is not None
        if steps and term.normalize:
            yield ConfigError(
                "scores of single steps cannot be normalized",
                field=f"{field}.normalize",
                got="true",
                remedy="remove it",
            )
        if not steps and term.step_score != "sum":
            yield ConfigError(
                "has no effect",
                field=f"{field}.step_score",
                got=term.step_score,
                expected="set only if step_separator is set",
                remedy="set step_separator too, or remove this entry",
            )
        if label in taken and root(own).calls_functions:
            yield ConfigError(
                "a reward function has the same name", field=field, remedy="use a different name"
            )


class RewardModelConfig(Section):
    """The reward models, which are not trained. These settings apply to every reward model.

    Attributes:
        enable: Score responses with reward models, instead of reward functions or in addition to reward
            functions.
        models: Several reward models instead of one: {name: {path: …, weight: 1.0, tokenizer_path: …,
            custom_chat_template: …, normalize: false, step_separator: …, step_score: sum}, …}. The reward is
            the weighted sum of their scores. In trainer.placement, a model is called reward_model.NAME;
            reward_model means all models.
        use_dynamic_bsz: Limit micro-batches by their number of tokens instead of their number of samples.
        ulysses_sequence_parallel_size: Number of devices that share the computation of one sequence (Ulysses
            sequence parallelism).
        forward_micro_batch_size_per_gpu: Samples per micro-batch and device. null: all samples that are on
            the device.
        forward_max_token_len_per_gpu: Tokens per micro-batch and device, with use_dynamic_bsz=true.
    """

    enable: bool = key(False, needs=(_NO_MODEL, _TWO_MODELS))
    models: Annotated[dict[str, ScorerTerm], ByName] = key(
        {}, when=beside("enable", True), needs=(names, _scorers, _CHANGED_MODELS)
    )
    model: RewardBackboneConfig = section(
        RewardBackboneConfig(), when=_MODEL, below=dict.fromkeys(LEARNING, NOT_TRAINED)
    )
    use_dynamic_bsz: bool = key(False, inherits="critic.use_dynamic_bsz", when=_MODEL, resumed="reported")
    ulysses_sequence_parallel_size: int = key(1, when=_MODEL, ge=1, resumed="reported")
    forward_micro_batch_size_per_gpu: int | None = key(
        None, when=(_MODEL, BY_SAMPLES), ge=1, resumed="reported"
    )
    forward_max_token_len_per_gpu: int = key(
        32768,
        inherits="critic.forward_max_token_len_per_gpu",
        when=(_MODEL, BY_TOKENS),
        needs=holds_longest,
        ge=1,
        resumed="reported",
    )
    fsdp_config: FSDPConfig = section(FSDPConfig(), when=_MODEL, below=FORWARD_ALONE)
    overlong_buffer: OverlongBufferConfig = section(
        OverlongBufferConfig(), when=beside("overlong_buffer.enable", True)
    )

    @property
    def scorers(self) -> Mapping[str, ScorerTerm]:
        """A dict from role to the config of a reward model."""
        if not self.enable:
            return {}
        several = {f"reward_model.{name}": term for name, term in self.models.items()}
        return several or {"reward_model": ScorerTerm(path=self.model.path)}

    @property
    def forward_batching(self) -> Batching:
        return Batching.of(
            self.use_dynamic_bsz, self.forward_micro_batch_size_per_gpu, self.forward_max_token_len_per_gpu
        )
