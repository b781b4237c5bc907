"""`actor_rollout_ref.model`: the policy's weights and tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from tandem.config.needs import Check, ModelFolder
from tandem.config.section import (
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
from tandem.config.view import root
from tandem.errors import ConfigError
from tandem.texts import parse_json

PLAIN_DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""The model types whose decoder is embedding, layers and norm, the same parts in every layer: they can be
split over devices, and the native engine runs them fused. Others are trained as transformers runs them."""

SHARED_OUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What of a model's config devices that split its layers must share out evenly."""

ATTENTION = ("auto", "torch", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Kernels of attention, as transformers names their packages."""

_GROUPS = ("matmul", "attention")
_ALL = "all-linear"
_ADAPTED = When(lambda own: own.lora_rank > 0, "with {lora_rank} above 0")


def _layers(mode: str, expected: str) -> Check:
    return Check(
        lambda own, count: count is None and own.gradient_checkpointing_mode == mode,
        "missing",
        expected=expected,
        remedy="set {}, or {gradient_checkpointing_mode}=full",
    )


_EVERY_LAYER = Check(
    lambda own, count: count == 1 and own.gradient_checkpointing_mode == "every",
    "one layer in one is every layer",
    expected=">= 2",
    remedy="set {gradient_checkpointing_mode}=full and remove this key",
)
_NO_OPERATOR = Check(
    lambda own, operators: not operators,
    "no operator's output is kept",
    got="nothing",
    expected="at least one operator",
    remedy="set {gradient_checkpointing_mode}=full and remove this key",
)
_ALL_OR_NAMES = Check(
    lambda own, modules: _ALL in modules and len(modules) > 1,
    f"{_ALL} stands beside names of layers",
    expected=f"{_ALL}, or names",
    remedy=f"leave {_ALL} or the names out",
)
_ADAPTERS = Check(
    lambda own, folder: (
        folder is not None and not os.path.isfile(os.path.join(folder, "adapter_config.json"))
    ),
    "no folder of adapters",
    expected="a folder with adapter_config.json, as peft and tandem export --adapter write it",
)


def _cuda_alone(
    asks: Callable[[Any, Any], bool], whose: str = "these", field: str = "", instead: str = "auto"
) -> Check:
    """Return the check that kernels of CUDA devices alone are not asked for on a CPU."""
    return Check(
        lambda own, kernels: asks(own, kernels) and root(own).trainer.device == "cpu",
        f"{whose} kernels run on CUDA devices alone",
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
    "{}=true: no effect; on a CPU the head is PyTorch's without it too.",
    notice=True,
)


def _operators(own: Any, name: str) -> Iterator[ConfigError]:
    for operator in getattr(own, name):
        if operator not in _GROUPS and not all(operator.partition(".")):
            yield ConfigError(
                "unknown operator",
                got=operator,
                expected=f"{', '.join(_GROUPS)}, or namespace.operator such as aten.mm",
                remedy=nearest_remedy(operator, _GROUPS),
            )


def stored_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model's folder; empty where it cannot be read, which is for others to report."""
    try:
        stored = parse_json((Path(folder).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


class BackboneConfig(Section):
    """A Hugging Face model folder and how it is run.

    Attributes:
        path: Hugging Face model folder
        trust_remote_code: run Python code that lies in the model folder
        enable_gradient_checkpointing: recompute activations in the backward pass, to save memory, as
            gradient_checkpointing_mode says
        gradient_checkpointing_mode: layers that recompute; auto: none, all as with ops, or all, the fastest
            whose activations fit into the memory that is free at the first update, which is said then; full:
            all; first: the first so many; every: one in so many; ops: all, but some operators' outputs are
            kept
        gradient_checkpointing_layers: how many: with mode first the layers that recompute, with every one in
            so many
        gradient_checkpointing_ops: with mode ops, whose outputs are kept: matmul, attention, or operators of
            PyTorch such as aten.mm
        enable_activation_offload: keep activations in host memory between forward and backward
        activation_offload_mode: async: copies run beside the next layer's computation; sync: computation
            waits for them
        use_remove_padding: pack sequences end to end; false: pad each micro-batch to its longest
        attn_implementation: kernels of attention in half precision on CUDA devices; torch: PyTorch's own;
            auto: flash_attention_3 or 4 where installed for the GPU, else torch
        use_liger: kernels of norms, gated layers and rotary embeddings on CUDA devices; true: Liger's, which
            must be installed; null: Liger's where installed, else Tandem's own of norms and gates, in Triton;
            false: transformers' operators
        lora_rank: rank of the low-rank adapters (LoRA) that are trained while the weights stay as they are;
            0: no adapters, all weights are trained
        lora_alpha: what adapters add is scaled by lora_alpha / lora_rank
        target_modules: linear layers that get adapters: all-linear, all but the head, or the ends of their
            names
        exclude_modules: of these, the ends of the names that get none
        lora_adapter_path: folder of adapters, as peft writes it, to start from; null: they start by changing
            nothing. The reference policy is without them either way
    """

    path: LocalPath = key(..., needs=ModelFolder("config.json"))
    trust_remote_code: bool = key(False, resumed="told")
    enable_gradient_checkpointing: bool = key(True, resumed="told")
    gradient_checkpointing_mode: Annotated[str, OneOf(("auto", "full", "first", "every", "ops"))] = key(
        "auto", when=beside("enable_gradient_checkpointing", True), resumed="told"
    )
    gradient_checkpointing_layers: int | None = key(
        None,
        when=beside("gradient_checkpointing_mode", "first", "every"),
        needs=(
            _layers("first", "the number of layers"),
            _layers("every", "one layer in how many is computed again"),
            _EVERY_LAYER,
        ),
        ge=1,
        resumed="told",
    )
    gradient_checkpointing_ops: Names = key(
        ("matmul", "attention"),
        when=beside("gradient_checkpointing_mode", "ops"),
        needs=(_NO_OPERATOR, _operators),
        resumed="told",
    )
    enable_activation_offload: bool = key(False, resumed="told")
    activation_offload_mode: Annotated[str, OneOf(("async", "sync"))] = key(
        "async", when=beside("enable_activation_offload", True), resumed="told"
    )
    use_remove_padding: bool = key(True, resumed="told")
    attn_implementation: Annotated[str, OneOf(ATTENTION, {"sdpa": "torch"})] = key(
        "auto", needs=_ATTENTION_HERE, resumed="told"
    )
    use_liger: bool | None = key(None, needs=_LIGER_HERE, resumed="told")

    lora_rank: int = key(0, ge=0)
    lora_alpha: int = key(16, when=_ADAPTED, ge=1)
    target_modules: Names = key(("all-linear",), when=_ADAPTED, needs=_ALL_OR_NAMES, min_length=1)
    exclude_modules: Names = key((), when=_ADAPTED)
    lora_adapter_path: LocalPath | None = key(None, when=_ADAPTED, needs=_ADAPTERS)

    @property
    def recomputes_by_memory(self) -> bool:
        """Whether what is computed again is chosen by the memory that is free."""
        return self.enable_gradient_checkpointing and self.gradient_checkpointing_mode == "auto"

    @property
    def without_adapters(self) -> BackboneConfig:
        """The same model with all of its weights and nothing else."""
        return self.model_copy(update={"lora_rank": 0})

    @property
    def head(self) -> str:
        """Which implementation makes log-probs and entropies, of `tandem.models.heads`."""
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
    "lora_adapter_path",
)
"""Keys of a model that is trained."""


class FusedKernelOptions(Section):
    """How the fused head is made.

    Attributes:
        impl_backend: kernels of the head, with use_fused_kernels; auto: triton on a CUDA device, else torch;
            liger's entropy is of the model's precision
    """

    all_resumed = "told"

    impl_backend: Annotated[str, OneOf(("auto", "torch", "triton", "liger"))] = "auto"


class ModelConfig(BackboneConfig):
    """The policy: actor, reference and rollout share it.

    Attributes:
        tokenizer_path: folder of the tokenizer
        custom_chat_template: Jinja chat template; null: the tokenizer's own
        use_fused_kernels: log-probs and entropies by the kernels of fused_kernel_options; null: by Triton's
            on a CUDA device where Triton is installed, else by PyTorch's operators; false: by these
            everywhere. All go through the vocabulary tile by tile
    """

    tokenizer_path: LocalPath = key(inherits=".path", needs=ModelFolder("tokenizer_config.json"))
    custom_chat_template: str | None = None
    use_fused_kernels: bool | None = key(None, needs=(_HEAD_HERE, _SAME_HEAD), resumed="told")
    fused_kernel_options: FusedKernelOptions = section(
        FusedKernelOptions(), below={"impl_backend": beside("use_fused_kernels", True, notice=True)}
    )

    @property
    def head(self) -> str:
        if self.use_fused_kernels is None:
            return "auto"
        return self.fused_kernel_options.impl_backend if self.use_fused_kernels else "torch"
