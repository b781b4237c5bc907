"""Export as a Hugging Face folder: safetensors shards, config, and what the caller puts beside them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tandem.checkpoint.shards import ShardWriter
from tandem.checkpoint.staging import staged
from tandem.errors import CheckpointError


def export(
    weights: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    beside: Callable[[Path], object],
    out: Path,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    auto_class: Any = AutoModelForCausalLM,
) -> Path:
    """Writes a model that `from_pretrained` loads. The folder appears whole or not at all. Of the weights one
    file's worth is held at a time, and the one that comes.

    Args:
        weights: full tensors by the names of the transformers model, in any order, on any device; a
            tied weight may come once, or under both its names.
        config: of the model; not changed.
        beside: given the folder, which then holds config.json alone, writes what belongs beside the weights.
        out: must not exist, or be empty.
        dtype: of floating-point weights in the files; the config names it.
        max_shard_bytes: size of one weights file at most; several get an index.
        trust_remote_code: for architectures that transformers does not have itself.
        auto_class: what loads the folder: `AutoModelForCausalLM`, `AutoModelForSequenceClassification`.

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
        skeleton: PreTrainedModel = auto_class.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
        )
    with staged(out) as folder:
        skeleton.config.architectures = [type(skeleton).__name__]
        skeleton.config.dtype = dtype
        skeleton.config.to_json_file(folder / "config.json")
        beside(folder)
        writer = ShardWriter(folder, max_shard_bytes)
        for name, tensor in _as_stored(skeleton, _checked(skeleton, weights, dtype)):
            writer.add(name, tensor)
        writer.close()
    return out


def _checked(
    skeleton: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """A copy on the host of each weight, as the buffer behind a yielded tensor may be used again for the
    next; a tied pair once, under its source's name.

    Raises:
        CheckpointError: weights that do not fit the architecture, or are not all of it.
    """
    tied = skeleton.get_expanded_tied_weights_keys(all_submodels=True)
    left = {name: value.shape for name, value in skeleton.state_dict().items() if name not in tied}
    shared: dict[str, bytes] = dict.fromkeys(tied.values(), b"")
    for given, tensor in weights:
        name = tied.get(given, given)
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        host = torch.empty(tensor.shape, dtype=wanted).copy_(tensor.detach())
        if name in shared:
            digest = hashlib.sha256(host.view(-1).view(torch.uint8).numpy().data).digest()
            known = shared[name]
            if known not in (b"", digest):
                raise CheckpointError(
                    "two weights that the config ties have different values",
                    field=given,
                    expected=f"the values of {name}",
                    remedy="set tie_word_embeddings=false in the model's config",
                )
            if known:
                continue
            shared[name] = digest
        expected = left.pop(name, None)
        if expected != host.shape:
            raise CheckpointError(
                "a weight does not fit the architecture",
                field=given,
                got=host.shape,
                expected=expected or "no such weight, or each once",
            )
        yield name, host
    if left:
        missing = min(left)
        raise CheckpointError(
            f"{len(left)} weights of the architecture are missing",
            field=missing,
            got="missing",
            expected=left[missing],
        )


def _as_stored(
    skeleton: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights as folders of this architecture have them, where transformers' own model has them
    otherwise, such as all experts of a layer in one tensor. Only where a folder's tensor is made of several
    of the model's, they are all held."""
    whole = skeleton.state_dict()
    parts = [revert_weight_conversion(skeleton, {key: value}) for key, value in whole.items()]
    if sorted(chain(*parts)) != sorted(revert_weight_conversion(skeleton, whole)):
        yield from revert_weight_conversion(skeleton, dict(weights)).items()
        return
    for name, tensor in weights:
        yield from revert_weight_conversion(skeleton, {name: tensor}).items()
