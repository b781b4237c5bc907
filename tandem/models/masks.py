"""Masks that say which earlier tokens a layer attends to, without a matrix.

Models of transformers build their masks themselves: causal, within a sliding window, or within a chunk. For
an attention function that is registered here, a model gets a `Mask` object in place of a tensor. It passes
the object to its layers, and the attention function reads the window or chunk from it. So a layer's window is
right even if the model applies it in the mask alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from tandem.errors import ModelError

_tokens: ContextVar[Any] = ContextVar("_tokens")
_WINDOW, _CHUNK, _AND, _OR, _BLOCKS, _PACKED = (
    f"{maker}.<locals>.{made}"
    for maker, made in (
        ("sliding_window_overlay", "inner_mask"),
        ("chunked_overlay", "inner_mask"),
        ("and_masks", "and_mask"),
        ("or_masks", "or_mask"),
        ("blockwise_overlay", "inner_mask"),
        ("packed_sequence_mask_function", "inner_mask"),
    )
)


class Mask:
    """The earlier tokens of the same sequence to which a layer's tokens attend.

    This is a plain class, because FSDP copies the fields of dataclasses.

    Attributes:
        tokens: the object that was passed to `attending`, which describes the tokens.
        window: the number of last tokens, with the token itself, to which a token attends; 0: all.
        chunk: the size of the chunks of positions. A token attends only to tokens of its own chunk; 0: all.
    """

    __slots__ = ("chunk", "tokens", "window")

    def __init__(self, tokens: Any, window: int = 0, chunk: int = 0) -> None:
        self.tokens, self.window, self.chunk = tokens, window, chunk


@contextmanager
def attending(tokens: Any) -> Iterator[None]:
    """Inside the context, put `tokens` into the masks that a model builds.

    Call the model with an `attention_mask` of ones, (1, N) bool. Without it, transformers would look for
    packed sequences in the positions, which waits for the device.
    """
    before = _tokens.set(tokens)
    try:
        yield
    finally:
        _tokens.reset(before)


def attended() -> Any:
    """Return the object that was passed to `attending`; None outside of the context."""
    return _tokens.get(None)


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Register an attention function with transformers. It gets a `Mask` as its `attention_mask`."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _mask)


def mask_of(mask: Any, module: object) -> Mask:
    """Return the mask that an attention function was called with.

    Args:
        mask: the argument `attention_mask` of the attention function.
        module: the layer that calls the attention function, for the message.

    Raises:
        ModelError: If the model was called outside of `attending`, or builds masks in its own way.
    """
    if isinstance(mask, Mask):
        return mask
    raise ModelError(
        "the layer was called without a mask of its own tokens",
        field="model.path",
        got=f"{type(module).__name__} with a mask of type {type(mask).__name__}",
        expected="a model whose masks come from transformers.masking_utils, called inside `attending`",
        remedy="call the model through PolicyModel or ValueModel, or set another attention implementation",
    )


def _mask(*, mask_function: Callable[..., Any], **_: Any) -> Mask:
    """Return the mask that a model asks for, with the signature of transformers' mask functions."""
    window, chunk = _limits(mask_function)
    return Mask(attended(), window, chunk)


def _limits(function: Any) -> tuple[int, int]:
    """Return the window and the chunk of a mask function of transformers; 0 means no limit."""
    if function is causal_mask_function:
        return 0, 0
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    held = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    kind = _name(function)
    if kind == _AND:
        found = [_limits(part) for part in held["mask_functions"]]
        windows, chunks = ([limit for limit in limits if limit] for limits in zip(*found, strict=True))
        return min(windows, default=0), min(chunks, default=0)
    if kind == _OR:
        others = [part for part in held["mask_functions"] if _name(part) != _BLOCKS]
        if len(others) == 1:  # a block is an image, and sequences here are text
            return _limits(others[0])
    if kind == _WINDOW:
        return int(held["sliding_window"]), 0
    if kind == _CHUNK:
        return 0, int(held["chunk_size"])
    if kind == _PACKED:
        return 0, 0  # the attention function knows the sequences
    raise ModelError(
        "the model's mask is not causal with a window or chunks",
        field="model.path",
        got=kind,
        expected="a causal mask, a sliding window or chunks",
        remedy="train another model",
    )


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
