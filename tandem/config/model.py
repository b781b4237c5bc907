"""`actor_rollout_ref.model`: the policy's weights and tokenizer."""

from __future__ import annotations

from typing import Annotated

from tandem.config.section import LocalPath, Names, OneOf, Section, key

LOADING = "models.loading"
ACTIVATIONS = "models.activations"
LORA = "models.lora"


class BackboneConfig(Section):
    """A Hugging Face model folder and how it is run."""

    path: LocalPath = key(..., "Hugging Face model folder", read_by=LOADING)
    trust_remote_code: bool = key(False, "run Python code that lies in the model folder", read_by=LOADING)
    enable_gradient_checkpointing: bool = key(
        True, "recompute activations in the backward pass, to save memory", read_by=ACTIVATIONS
    )
    gradient_checkpointing_mode: Annotated[str, OneOf(("full", "first", "every", "ops"))] = key(
        "full",
        "layers that recompute; full: all; first: the first so many; every: one in so many; ops: all, but "
        "some operators' outputs are kept",
        read_by=ACTIVATIONS,
    )
    gradient_checkpointing_layers: int | None = key(
        None,
        "how many: with mode first the layers that recompute, with every one in so many",
        ge=1,
        read_by=ACTIVATIONS,
    )
    gradient_checkpointing_ops: Names = key(
        ("matmul", "attention"),
        "with mode ops, whose outputs are kept: matmul, attention, or operators of PyTorch such as aten.mm",
        read_by=ACTIVATIONS,
    )
    enable_activation_offload: bool = key(
        False, "keep activations in host memory between forward and backward", read_by=ACTIVATIONS
    )
    activation_offload_mode: Annotated[str, OneOf(("async", "sync"))] = key(
        "async",
        "async: copies run beside the next layer's computation; sync: computation waits for them",
        read_by=ACTIVATIONS,
    )
    use_remove_padding: bool = key(
        True,
        "pack sequences end to end; false: pad each micro-batch to its longest",
        read_by="engines.train.fsdp",
    )
    use_liger: bool = key(
        False,
        "Liger's kernels for norms, rotary embeddings and gated layers; a CUDA device and liger-kernel "
        "are needed",
        read_by="models.liger",
    )

    lora_rank: int = key(
        0,
        "rank of the low-rank adapters (LoRA) that are trained while the weights stay as they are; 0: no "
        "adapters, all weights are trained",
        read_by=LORA,
        ge=0,
    )
    lora_alpha: int = key(16, "what adapters add is scaled by lora_alpha / lora_rank", read_by=LORA, ge=1)
    target_modules: Names = key(
        ("all-linear",),
        "linear layers that get adapters: all-linear, all but the head, or the ends of their names",
        read_by=LORA,
        min_length=1,
    )
    exclude_modules: Names = key((), "of these, the ends of the names that get none", read_by=LORA)
    lora_adapter_path: LocalPath | None = key(
        None,
        "folder of adapters, as peft writes it, to start from; null: they start by changing nothing. The "
        "reference policy is without them either way",
        read_by=f"{LORA}_files",
    )

    @property
    def without_adapters(self) -> BackboneConfig:
        """The same model with all of its weights and nothing else."""
        return self.model_copy(update={"lora_rank": 0})

    @property
    def head(self) -> str:
        """Which implementation makes log-probs and entropies, of `tandem.models.heads`."""
        return "torch"


class FusedKernelOptions(Section):
    """How the fused head is made."""

    impl_backend: Annotated[str, OneOf(("auto", "torch", "triton", "liger"))] = key(
        "auto",
        "kernels of the head, with use_fused_kernels; auto: triton on a CUDA device, else torch; liger's "
        "entropy is of the model's precision",
        read_by="models.heads",
    )


class ModelConfig(BackboneConfig):
    """The policy: actor, reference and rollout share it."""

    tokenizer_path: LocalPath = key(meaning="folder of the tokenizer", read_by=LOADING, inherits=".path")
    custom_chat_template: str | None = key(
        None, "Jinja chat template; null: the tokenizer's own", read_by=LOADING
    )
    use_fused_kernels: bool = key(
        False,
        "log-probs and entropies by the kernels of fused_kernel_options; false: by PyTorch's operators, "
        "tile by tile, which does not hold all logits at once either",
        read_by="models.heads",
    )
    fused_kernel_options: FusedKernelOptions = FusedKernelOptions()

    @property
    def head(self) -> str:
        return self.fused_kernel_options.impl_backend if self.use_fused_kernels else "torch"
