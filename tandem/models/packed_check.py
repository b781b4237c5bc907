"""A check that packing does not change a model's outputs.

For sequences packed into one row, a model must compute the same outputs as for each sequence alone. If one
sequence could attend to another, or if positions were counted across sequences, training would use wrong
log-probs without any error.

An architecture is tested with a small copy in float64 with random weights. So neither the scale of a
checkpoint's weights nor rounding hides an error. When the training engine starts, the weights of the run are
also tested, on the run's device and in the run's precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ModelError, TandemError
from tandem.models.angles import fit_angles, forget_lengths
from tandem.models.architectures import auto_class, may_pack, require_task, rows_attention
from tandem.models.attention import PACKED
from tandem.models.double_precision import double_precision
from tandem.models.loading import load_config, require_trainable
from tandem.models.packed_verdict import PackedCheck
from tandem.models.packing import PackedInputs, pack
from tandem.models.policy import PackedModel, PolicyModel
from tandem.models.score import ScoreModel
from tandem.models.small_copy import LONGEST, angle_limits, small_copy, window_limits
from tandem.protocol import Ragged

_unfit = partial(ModelError, field="model.path")
_LENGTHS = (9, 1, 33, 2, 17)
_MOST_WEIGHTS = 30_000_000
_REPEATS = 16
_GAIN, _SPREAD = 1.5, 0.3


def check_sequences(vocabulary: int) -> Ragged:
    """Return sequences of different lengths for testing a model."""
    return _drawn(_LENGTHS, vocabulary, seed=0)


def packing_error(path: str | Path, lengths: Sequence[int]) -> float:
    """Return the largest difference between sequences trained together and each alone in transformers.

    This is the comparison of `check_packed` for sequences of given lengths.

    Args:
        path: folder with the config.json of a causal language model.
        lengths: the number of tokens of each sequence.

    Raises:
        ModelError: see `check_packed`.
    """
    with double_precision():
        packed, own = _made(path, scorer=False, trust_remote_code=False)
        tokens = _drawn(lengths, own.config.get_text_config().vocab_size - 1, seed=5)
        return _packing_error(packed, own, tokens)


def check_packed(
    path: str | Path, *, scorer: bool = False, trust_remote_code: bool = False
) -> tuple[PackedCheck, Any]:
    """Test the architecture of a folder on the CPU, in float64. The folder's weights are not read.

    Args:
        path: folder with a config.json.
        scorer: whether the model is trained as a reward model instead of a causal language model.
        trust_remote_code: whether to run the model code in the folder.

    Returns:
        The results, and the small copy: a transformers model with transformers' attention, in evaluation
        mode.

    Raises:
        ModelError: If the folder cannot be used, the architecture cannot be trained, or a small copy cannot
            be created.
    """
    with double_precision():
        packed, own = _made(path, scorer=scorer, trust_remote_code=trust_remote_code)
        limits = window_limits(load_config(path, trust_remote_code=trust_remote_code))
        return _try_copy(path, packed, own, limits), own


def _made(path: str | Path, *, scorer: bool, trust_remote_code: bool) -> tuple[PackedModel, Any]:
    """Build the small copy with the attention of training, and with transformers' own; see `_pair`."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    model = require_task(path, config, scorer=scorer, trust_remote_code=trust_remote_code)
    attention = PACKED if may_pack(model, config) else rows_attention(model, config)
    return _pair(path, config, attention, scorer=scorer, trust_remote_code=trust_remote_code)


def _pair(
    path: str | Path, config: Any, attention: str, *, scorer: bool, trust_remote_code: bool
) -> tuple[PackedModel, Any]:
    """Build the small copy twice, with the same weights.

    The first copy is the model that training uses. The second copy is transformers' model, in evaluation
    mode.
    """
    kind = auto_class(config, scorer=scorer)
    if scorer:
        config.num_labels, config.pad_token_id = 1, None
    try:
        small = small_copy(config)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": torch.float64}
        with torch.device("meta"):
            size = sum(p.numel() for p in kind.from_config(small, **options).parameters())
        if size > _MOST_WEIGHTS:
            raise ValueError(f"it has {size:,} weights")
        model = kind.from_config(small, attn_implementation=attention, **options)
        _draw(model)
        own = kind.from_config(small_copy(config), attn_implementation="eager", **options)
        own.load_state_dict(model.state_dict())
    except Exception as error:  # a model's class may raise any exception
        raise _unfit(
            "Tandem cannot make a small copy of the model to try it on packed sequences",
            got=f"{path}: {type(error).__name__}: {_first_line(error)}",
            remedy="train another model",
        ) from error
    require_trainable(model, scorer=scorer)
    fit_angles(model)
    model.train()
    packed: PackedModel = ScoreModel(model) if scorer else PolicyModel(model)
    packed.in_rows = attention != PACKED
    return packed, own.eval()


def _try_copy(path: str | Path, packed: PackedModel, own: Any, limits: Sequence[int]) -> PackedCheck:
    text = own.config.get_text_config()
    vocabulary = text.vocab_size - 1  # the last id may stand for an image
    positions = None if list(angle_limits(text)) else getattr(text, "max_position_embeddings", None)
    most = min(LONGEST, positions or LONGEST)
    within = max(2, min([most, 24, *window_limits(text)]))
    short = _drawn((within, 1, within - 1, 2, within), vocabulary, seed=1)
    long = _drawn((most, 1, max(1, most // 4), max(1, most - 3), 2), vocabulary, seed=2)
    try:
        _require_repeatable(path, packed, _drawn([within] * 12, vocabulary, seed=0))
        gradient, others = _leaked(packed, short), _changed(packed, short)
        alone = _packing_error(packed, own, short)
    except TandemError:
        raise
    except Exception as error:
        raise _unfit(
            "the model's own code fails on packed sequences",
            got=f"{path}: {type(error).__name__}: {_first_line(error)}",
            expected="a decoder that takes position_ids and passes other keyword arguments to attention",
            remedy="train another model",
        ) from error
    beyond, failure = float("nan"), ""
    try:
        gradient, others = _larger(gradient, _leaked(packed, long)), _larger(others, _changed(packed, long))
        beyond = _packing_error(packed, own, long)
    except Exception as error:
        failure = _first_line(error)
    return PackedCheck(
        gradient, others, alone, beyond, failure or None, min(limits, default=None), packed.in_rows
    )


def _require_repeatable(path: str | Path, packed: PackedModel, tokens: Ragged) -> None:
    """Check that the model's outputs are the same in repeated runs.

    Random numbers may change the outputs only rarely, for instance between experts with nearly equal scores.
    So a model that uses random numbers is run many times.
    """
    inputs, before = _packed(packed, tokens), torch.get_rng_state()
    with torch.no_grad():
        first = _outcome(packed, inputs)
        draws = not torch.equal(before, torch.get_rng_state())
        differences = [_difference(_outcome(packed, inputs), first) for _ in range(_REPEATS * draws)]
    if any(difference > 0 for difference in differences):
        raise _unfit(
            "the model draws random numbers in training, although every dropout of its config is zero",
            got=f"{path}: outcomes of the same tokens differ by up to {max(differences):.3g}",
            expected="the same log-probs each time, because they are compared with the rollout's log-probs",
            remedy="train another model",
        )


def _leaked(packed: PackedModel, tokens: Ragged) -> float:
    """Return the largest gradient of a sequence's outputs with respect to other sequences' embeddings.

    The result is NaN if no embeddings were found.
    """
    inputs = _packed(packed, tokens)
    rows, places = tokens.row_ids(), _row_bounds(packed, inputs)
    embedded: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        if output.shape[:-1].numel() == places[-1] and output.requires_grad:
            embedded.append(output)

    tables = {part for part in packed.model.modules() if isinstance(part, nn.Embedding)}
    tables.add(packed.model.get_input_embeddings())
    hooks = [table.register_forward_hook(keep) for table in tables]
    try:
        outcome = _outcome(packed, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    weights = torch.randn(len(outcome), generator=torch.Generator().manual_seed(3), dtype=outcome.dtype)
    worst = torch.zeros(()) if embedded else torch.tensor(math.nan)
    for row in range(len(tokens) if embedded else 0):
        mine = (outcome * weights)[rows == row].sum()
        for found in torch.autograd.grad(mine, embedded, retain_graph=True, allow_unused=True):
            if found is not None:
                others = found.detach().flatten(0, -2).abs().clone()
                others[places[row] : places[row + 1]] = 0
                worst = torch.maximum(worst, others.max())
    return float(worst)


def _row_bounds(packed: PackedModel, inputs: PackedInputs) -> list[int]:
    """Return the offsets of the sequences among all tokens that are computed, with the padding of rows."""
    packing = inputs.packing
    if packed.in_rows:
        return [row * packing.max_length for row in range(len(packing.lengths) + 1)]
    places: list[int] = packing.cu_seqlens.tolist()
    return places


def _changed(packed: PackedModel, tokens: Ragged) -> float:
    """Return how much a sequence's outputs change when all other sequences get other tokens."""
    vocabulary, worst = packed.model.config.get_text_config().vocab_size - 1, 0.0
    rows, before = tokens.row_ids(), _outcome(packed, _packed(packed, tokens)).detach()
    for row in range(len(tokens)):
        other = _drawn(tokens.lengths.tolist(), vocabulary, seed=4 + row).values
        mixed = Ragged(torch.where(rows == row, tokens.values, other), tokens.offsets)
        after = _outcome(packed, _packed(packed, mixed)).detach()
        worst = _larger(worst, _difference(after[rows == row], before[rows == row]))
    return worst


def _packing_error(packed: PackedModel, own: Any, tokens: Ragged) -> float:
    """Return the largest difference between packed sequences, as in training, and each sequence alone."""
    together = _outcome(packed, _packed(packed, tokens)).detach()
    return _difference(
        together, torch.cat([_outcome_alone(own, row, scores=packed.whole_sequences) for row in tokens])
    )


def _outcome_alone(own: Any, row: Tensor, *, scores: bool) -> Tensor:
    """Return (T) the outputs of transformers' model for a single sequence.

    For a causal language model, this is the log-prob of each token given the tokens before it, with 0 for the
    first token. For a reward model, it is the score of the sequence, at the last token.
    """
    forget_lengths(own)
    with torch.no_grad():
        logits = own(input_ids=row[None, :], use_cache=False).logits[0]
    if scores:
        return torch.cat([logits.new_zeros(len(row) - 1), logits.reshape(-1)[-1:]])
    found = torch.log_softmax(logits[:-1], -1).gather(-1, row[1:, None]).squeeze(-1)
    return torch.cat([logits.new_zeros(1), found])


def _packed(packed: PackedModel, tokens: Ragged) -> PackedInputs:
    return pack(tokens, None, device=torch.device("cpu"), whole=packed.whole_sequences)


def _outcome(packed: PackedModel, inputs: PackedInputs) -> Tensor:
    name = "scores" if packed.whole_sequences else "log_probs"
    out: Tensor = packed(inputs, frozenset({name}))[name]
    return out


def _difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference between two tensors; NaN if any entry is NaN."""
    return float(((first - second).abs() / second.abs().clamp(min=1)).max())


def _larger(first: float, second: float) -> float:
    """Return the larger number; NaN if one of the numbers is NaN."""
    return first if math.isnan(first) or second <= first else second


def _drawn(lengths: Sequence[int], vocabulary: int, *, seed: int) -> Ragged:
    draw = torch.Generator().manual_seed(seed)
    return Ragged.from_list([torch.randint(vocabulary, (length,), generator=draw) for length in lengths])


def _draw(model: nn.Module) -> None:
    """Set random weights with which every layer affects the outputs.

    The architecture's initial weights may hide errors. With these weights, attention is selective, gates are
    open, and biases are not zero.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            if weight.dim() < 2:
                weight.add_(noise, alpha=_SPREAD)
            else:
                weight.copy_(noise if id(weight) in tables else noise * _GAIN * weight.shape[-1] ** -0.5)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
