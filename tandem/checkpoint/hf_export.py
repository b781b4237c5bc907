"""Export as a Hugging Face folder: safetensors shards, config, tokenizer, generation settings."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tandem.checkpoint.staging import staged
from tandem.errors import CheckpointError


def export(
    weights: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    dtype: torch.dtype,
    *,
    generation_config: GenerationConfig | None = None,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> Path:
    """Writes a causal LM that `from_pretrained` loads. The folder appears whole or not at all.

    Args:
        weights: full tensors by the names of the transformers model, in any order, on any device; a
            tied weight may come once, or under both its names. All are held on the host in `dtype`.
        config: of the model; not changed.
        tokenizer: written beside the weights.
        out: must not exist, or be empty.
        dtype: of floating-point weights in the files; the config names it.
        generation_config: None derives one from the config.
        max_shard_bytes: size of one weights file at most; several get an index.
        trust_remote_code: for architectures that transformers does not have itself.

    Raises:
        CheckpointError: `out` is in use; weights are missing, unknown, of wrong shape, or tied and
            yet different; the disk is full.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            "the folder for the export is in use", field=str(out), expected="a new or empty folder"
        )
    with torch.device("meta"):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
        )
    if generation_config is not None:
        skeleton.generation_config = generation_config
    state = _host_copies(weights, dtype)
    tied = skeleton.get_expanded_tied_weights_keys(all_submodels=True)
    _drop_tied(state, tied)
    shapes = {name: t.shape for name, t in skeleton.state_dict().items() if name not in tied}
    _check_complete(state, shapes)
    with staged(out) as folder:
        skeleton.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_bytes)
        tokenizer.save_pretrained(folder)
    return out


def _host_copies(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies, as the buffer behind a yielded tensor may be used again for the next."""
    return {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in weights
    }


def _drop_tied(state: dict[str, Tensor], tied: dict[str, str]) -> None:
    """Of a tied pair only the source is stored."""
    for target, source in tied.items():
        if target not in state:
            continue
        if source not in state:
            state[source] = state[target]
        elif not torch.equal(state[target], state[source]):
            raise CheckpointError(
                "two weights that the config ties have different values",
                field=target,
                expected=f"the values of {source}",
                remedy="set tie_word_embeddings=false in the model's config",
            )
        del state[target]


def _check_complete(state: dict[str, Tensor], expected: dict[str, torch.Size]) -> None:
    got = {name: tensor.shape for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} weights do not fit the architecture",
            field=wrong[0],
            got=got.get(wrong[0], "missing"),
            expected=expected.get(wrong[0], "no such weight"),
        )
