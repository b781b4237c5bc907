"""The section `actor_rollout_ref.model`: the policy's weights and tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any

from tandem.config.changed_models import ROPE
from tandem.config.mixture import MixtureConfig
from tandem.config.needs import Check, ModelFolder
from tandem.config.section import (
    Finding,
    LocalPath,
    Names,
    OneOf,
    Section,
    When,
    beside,
    key,
    nearest_remedy,
    section,
)
from tandem.config.view import path, root
from tandem.errors import ConfigError

PLAIN_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""The model types whose decoder is an embedding, layers and a norm, with equal submodules in all layers.

The native engine runs the layers of such models with fused operations. Other models are run with the module
of transformers.
"""

SPLIT_LAYERS = (
    *("apertus", "arcee", "aria_text", "axk2", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2"),
    *("deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "granite", "granite_swa"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hy_v3", "hy_v4", "hyperclovax"),
    *("jais2", "laguna", "llama", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax"),
    *("minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat"),
    *("olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3", "phi4_multimodal", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss"),
    *("smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu"),
)
"""The model types whose layers can be split over devices for training (tensor parallelism)."""

_ONE_STAGE = (
    *("axk2", "deepseek_v32", "gemma4_text", "glm_moe_dsa", "gpt_neox", "granite", "granite_swa"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hy_v4", "hyperclovax", "minimax", "nanochat"),
    *("olmo_hybrid", "phi", "phi4_multimodal", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
STAGED = tuple(kind for kind in SPLIT_LAYERS if kind not in _ONE_STAGE)
"""The model types that can be divided into pipeline stages.

In their decoder, only packed attention layers come between the embedding and the norm.
"""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names of the number of experts of a mixture in the configs of all architectures."""

SHARED_OUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""The sizes of a model that must divide evenly by the number of devices that split its layers."""

ATTENTION = ("auto", "torch", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention kernels, named as transformers names their packages."""

_OWN_KEY = {
    "attn_implementation": ("attention kernels have a key of their own", "attn_implementation"),
    "_attn_implementation": ("attention kernels have a key of their own", "attn_implementation"),
    "vocab_size": ("the rows of the embedding have a key of their own", "resize_embeddings"),
    "model_type": ("the architecture cannot be changed", ""),
    "architectures": ("the architecture cannot be changed", ""),
}
_PRECISION = "the keys of the engines set the data types"
_IDLE = {
    "use_cache": "each engine has its own cache",
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "transformers_version": "nothing reads it",
}

_AT_LEAST_ONE = ("factor", "max_position_embeddings", "original_max_position_embeddings")

_GROUPS = ("matmul", "attention")
_ALL = "all-linear"
_ADAPTED = When(lambda own: own.lora_rank > 0, "if {lora_rank} is above 0")


def _layers(mode: str, expected: str) -> Check:
    return Check(
        lambda own, count: count is None and own.gradient_checkpointing_mode == mode,
        "missing",
        expected=expected,
        remedy="set {}, or {gradient_checkpointing_mode}=full",
    )


_EVERY_LAYER = Check(
    lambda own, count: count == 1 and own.gradient_checkpointing_mode == "every",
    "1 means that every layer recomputes, which is mode full",
    expected=">= 2",
    remedy="set {gradient_checkpointing_mode}=full and remove this key",
)
_NO_OPERATOR = Check(
    lambda own, operators: not operators,
    "the list is empty, so no operator's output would be kept",
    got="nothing",
    expected="at least one operator",
    remedy="set {gradient_checkpointing_mode}=full and remove this key",
)
_ALL_OR_NAMES = Check(
    lambda own, modules: _ALL in modules and len(modules) > 1,
    f"{_ALL} cannot be combined with names of layers",
    expected=f"either {_ALL} or names",
    remedy=f"remove {_ALL} or the names",
)
_NO_TARGET = Check(
    lambda own, modules: not modules and not own.target_parameters,
    "the list is empty, so nothing would be trained",
    expected=f"{_ALL} or names of layers; only if {{target_parameters}} has names, the list may be empty",
)
_ADAPTERS = Check(
    lambda own, folder: (
        folder is not None and not os.path.isfile(os.path.join(folder, "adapter_config.json"))
    ),
    "this is not a folder of adapters",
    expected="a folder with adapter_config.json, as written by peft or `tandem export --adapter`",
)


def _cuda_alone(
    asks: Callable[[Any, Any], bool], whose: str = "these", field: str = "", instead: str = "auto"
) -> Check:
    """Return the check that a config for the CPU does not request kernels that need CUDA."""
    return Check(
        lambda own, kernels: asks(own, kernels) and root(own).trainer.device == "cpu",
        f"{whose} kernels only run on CUDA devices",
        field=field,
        got="{=} with trainer.device=cpu",
        expected="auto or torch" if instead == "auto" else None,
        remedy=f"set {{}}={instead}, or trainer.device=cuda",
    )


_HEAD = "fused_kernel_options.impl_backend"


def _needs_cuda(own: Any, kernels: str) -> bool:
    return bool(own.use_fused_kernels) and kernels in ("triton", "liger")


_LIGER_HERE = _cuda_alone(lambda own, liger: bool(liger), "Liger's", instead="false")
_ATTENTION_HERE = _cuda_alone(lambda own, kernels: kernels.startswith("flash"))
_HEAD_HERE = _cuda_alone(_needs_cuda, field=_HEAD)
_SAME_HEAD = Check(
    lambda own, fused: (
        fused and root(own).trainer.device == "cpu" and not _needs_cuda(own, attrgetter(_HEAD)(own))
    ),
    "{}=true: no effect; on a CPU, the head uses PyTorch operators in any case.",
    notice=True,
)


def _operators(own: Any, name: str) -> Iterator[ConfigError]:
    for operator in getattr(own, name):
        if operator not in _GROUPS and not all(operator.partition(".")):
            yield ConfigError(
                "unknown operator",
                got=operator,
                expected=f"{', '.join(_GROUPS)}, or namespace.operator, such as aten.mm",
                remedy=nearest_remedy(operator, _GROUPS),
            )


def override_fields(own: Any, name: str) -> Iterator[Finding]:
    """Check the changed fields of a model's config.json that have a key of their own or no effect."""
    at = path(own, name)
    for place, value in _leaves(getattr(own, name)):
        field, leaf = f"{at}.{place}", place.rpartition(".")[2]
        if leaf in _OWN_KEY:
            problem, remedy = _OWN_KEY[leaf]
            remedy = f"set {at[: -len(name)]}{remedy} instead" if remedy else "remove it"
            yield ConfigError(problem, field=field, got=value, remedy=remedy)
        elif "drop" in leaf and value not in (0, None):
            yield ConfigError(
                "models are always trained without dropout",
                field=field,
                got=value,
                expected="0",
                remedy="remove it",
            )
        elif leaf in _AT_LEAST_ONE and not (isinstance(value, int | float) and value >= 1):
            yield ConfigError("the value is invalid", field=field, got=value, expected="a number >= 1")
        elif leaf in _IDLE:
            yield f"{field}: no effect, because {_IDLE[leaf]}."
        elif leaf in ROPE and value is not None:
            expected = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}, for example"
            yield ConfigError("rotary parameters are a mapping", field=field, got=value, expected=expected)


def _leaves(changes: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{at}{name}.")
        else:
            yield at + name, value


OVERRIDE_CONFIG = key({}, needs=override_fields)
RESIZE_EMBEDDINGS = key(None, ge=1)
_NOT_LEARNT = Check(
    lambda own, rows: rows is not None and own.lora_rank > 0,
    "{}={=}: adapters do not train the embedding, so its new rows keep the mean of the old rows.",
    notice=True,
)


class BackboneConfig(Section):
    """A Hugging Face model folder, and the settings for running the model.

    Attributes:
        path: Hugging Face folder of the model.
        override_config: Fields of the model's config.json that this run changes, for example
            {max_position_embeddings: 131072}. Nested fields are merged.
        resize_embeddings: Number of rows of the embedding and the output head, for a tokenizer with added
            tokens. New rows are the mean of the old rows. null: as many as the folder has.
        trust_remote_code: Run Python code that is in the model folder.
        enable_gradient_checkpointing: Save memory by recomputing activations in the backward pass, as
            gradient_checkpointing_mode says.
        gradient_checkpointing_mode: Which activations are recomputed. full: in all layers. first: in the
            first gradient_checkpointing_layers layers. every: in one layer out of every
            gradient_checkpointing_layers layers. ops: in all layers, except the outputs of the operators in
            gradient_checkpointing_ops. auto: the fastest mode out of none, ops and full that fits into the
            memory that is free at the first update. A message names the mode.
        gradient_checkpointing_layers: For mode first: the number of layers that recompute. For mode every:
            one layer in this many recomputes.
        gradient_checkpointing_ops: For mode ops: the operators whose outputs are kept: matmul, attention, or
            PyTorch operators such as aten.mm.
        enable_activation_offload: Keep activations in host memory between the forward and the backward pass.
        activation_offload_mode: How activations are copied to and from host memory. async: while the next
            layer is computed. sync: the computation waits for the copies.
        mixture: How the routers of a mixture of experts are trained.
        use_remove_padding: Pack sequences end to end. false: pad each micro-batch to its longest sequence.
        attn_implementation: Attention kernels for half precision on CUDA devices. torch: PyTorch's kernels.
            auto: flash_attention_3 or flash_attention_4 if it is installed for the GPU, otherwise torch.
        use_liger: Kernels for norms, gated layers and rotary embeddings on CUDA devices. true: the kernels of
            Liger, which must be installed. null: Liger's kernels if installed, otherwise Tandem's Triton
            kernels for norms and gated layers. false: the operators of transformers.
        lora_rank: Rank of the low-rank adapters (LoRA). Only the adapters are trained; the model's weights
            stay fixed. 0: no adapters, all weights are trained.
        lora_alpha: The output of the adapters is multiplied by lora_alpha / lora_rank.
        target_modules: The linear layers that get adapters: all-linear (all except the head), or endings of
            their names.
        exclude_modules: Endings of the names of layers that get no adapters although target_modules includes
            them.
        target_parameters: Endings of the names of experts' weights that get an adapter for each expert, for
            example [experts.gate_up_proj, experts.down_proj]. all-linear does not include experts.
        lora_adapter_path: Folder of adapters in peft's format to start from. null: new adapters, which do not
            change the model at first. The reference policy never uses adapters.
    """

    path: LocalPath = key(..., needs=ModelFolder("config.json"))
    override_config: dict[str, Any] = OVERRIDE_CONFIG
    resize_embeddings: int | None = key(None, needs=_NOT_LEARNT, ge=1)
    trust_remote_code: bool = key(False, resumed="reported")
    enable_gradient_checkpointing: bool = key(True, resumed="reported")
    gradient_checkpointing_mode: Annotated[str, OneOf(("auto", "full", "first", "every", "ops"))] = key(
        "auto", when=beside("enable_gradient_checkpointing", True), resumed="reported"
    )
    gradient_checkpointing_layers: int | None = key(
        None,
        when=beside("gradient_checkpointing_mode", "first", "every"),
        needs=(
            _layers("first", "the number of layers"),
            _layers("every", "N, so that one layer in every N recomputes its activations"),
            _EVERY_LAYER,
        ),
        ge=1,
        resumed="reported",
    )
    gradient_checkpointing_ops: Names = key(
        ("matmul", "attention"),
        when=beside("gradient_checkpointing_mode", "ops"),
        needs=(_NO_OPERATOR, _operators),
        resumed="reported",
    )
    enable_activation_offload: bool = key(False, resumed="reported")
    activation_offload_mode: Annotated[str, OneOf(("async", "sync"))] = key(
        "async", when=beside("enable_activation_offload", True), resumed="reported"
    )
    mixture: MixtureConfig = MixtureConfig()
    use_remove_padding: bool = key(True, resumed="reported")
    attn_implementation: Annotated[str, OneOf(ATTENTION, {"sdpa": "torch"})] = key(
        "auto", needs=_ATTENTION_HERE, resumed="reported"
    )
    use_liger: bool | None = key(None, needs=_LIGER_HERE, resumed="reported")

    lora_rank: int = key(0, ge=0)
    lora_alpha: int = key(16, when=_ADAPTED, ge=1)
    target_modules: Names = key(("all-linear",), when=_ADAPTED, needs=(_ALL_OR_NAMES, _NO_TARGET))
    exclude_modules: Names = key((), when=_ADAPTED)
    target_parameters: Names = key((), when=_ADAPTED)
    lora_adapter_path: LocalPath | None = key(None, when=_ADAPTED, needs=_ADAPTERS)

    @property
    def recomputes_by_memory(self) -> bool:
        """Whether the amount of free memory decides what is recomputed."""
        return self.enable_gradient_checkpointing and self.gradient_checkpointing_mode == "auto"

    @property
    def without_adapters(self) -> BackboneConfig:
        """The same model config without adapters."""
        return self.model_copy(update={"lora_rank": 0})

    @property
    def head(self) -> str:
        """The implementation that computes log-probs and entropies, one of `tandem.models.heads`."""
        return "auto"


LEARNING = (
    "gradient_checkpointing_mode",
    "gradient_checkpointing_layers",
    "gradient_checkpointing_ops",
    "enable_activation_offload",
    "activation_offload_mode",
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "lora_adapter_path",
    "mixture",
)
"""Keys that only matter for a model that is trained."""


class FusedKernelOptions(Section):
    """The implementation of the fused head.

    Attributes:
        impl_backend: Kernels of the head, with use_fused_kernels=true. auto: triton on a CUDA device,
            otherwise torch. With liger, entropies have the model's precision.
    """

    all_resumed = "reported"

    impl_backend: Annotated[str, OneOf(("auto", "torch", "triton", "liger"))] = "auto"


class ModelConfig(BackboneConfig):
    """The policy's model, which actor, reference and rollout share.

    Attributes:
        tokenizer_path: Folder of the tokenizer.
        custom_chat_template: Jinja chat template. null: the template of the tokenizer.
        use_fused_kernels: How log-probs and entropies are computed. true: with the kernels of
            fused_kernel_options. null: with Triton kernels on a CUDA device if Triton is installed, otherwise
            with PyTorch operators. false: always with PyTorch operators. In all cases, the vocabulary is
            processed in tiles.
    """

    tokenizer_path: LocalPath = key(inherits=".path", needs=ModelFolder("tokenizer_config.json"))
    custom_chat_template: str | None = None
    use_fused_kernels: bool | None = key(None, needs=(_HEAD_HERE, _SAME_HEAD), resumed="reported")
    fused_kernel_options: FusedKernelOptions = section(
        FusedKernelOptions(), below={"impl_backend": beside("use_fused_kernels", True, notice=True)}
    )

    @property
    def head(self) -> str:
        if self.use_fused_kernels is None:
            return "auto"
        return self.fused_kernel_options.impl_backend if self.use_fused_kernels else "torch"
