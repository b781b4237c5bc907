"""`actor_rollout_ref.model`: the policy's weights and tokenizer."""

from __future__ import annotations

from tandem.config.section import LocalPath, Section, key

LOADING = "models.loading"


class BackboneConfig(Section):
    """A Hugging Face model folder and how it is run."""

    path: LocalPath = key(..., "Hugging Face model folder", read_by=LOADING)
    trust_remote_code: bool = key(False, "run Python code that lies in the model folder", read_by=LOADING)
    enable_gradient_checkpointing: bool = key(
        True, "recompute activations in the backward pass, to save memory", read_by="engines.train.fsdp"
    )
    use_remove_padding: bool = key(
        True,
        "pack sequences end to end; false: pad each micro-batch to its longest",
        read_by="engines.train.fsdp",
    )


class ModelConfig(BackboneConfig):
    """The policy: actor, reference and rollout share it."""

    tokenizer_path: LocalPath = key(meaning="folder of the tokenizer", read_by=LOADING, inherits=".path")
    custom_chat_template: str | None = key(
        None, "Jinja chat template; null: the tokenizer's own", read_by=LOADING
    )
