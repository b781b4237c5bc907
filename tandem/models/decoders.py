"""Functions that find the decoder of a model of transformers, and the decoder's layers, under any names."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn


def decoder_name(model: Any) -> str:
    """Return the dotted name of a model's decoder: embedding, layers and final norm, without the head.

    The decoder is the module that transformers names as such. Some architectures name the whole model, or a
    part of the head. Then it is the outermost module around the embedding that does not contain the head.

    Args:
        model: a causal language model, or a classifier whose head is named `score`.
    """
    names = {module: name for name, module in model.named_modules()}
    head, embedding = head_of(model), model.get_input_embeddings()
    found = model.get_decoder()
    outwards = _outwards(names[embedding])
    around = [name for name in outwards if head not in set(model.get_submodule(name).modules())]
    return names[found] if names.get(found) in around else around[-1]


def decoder_of(model: Any) -> Any:
    """Return a model's decoder; see `decoder_name`."""
    return model.get_submodule(decoder_name(model))


def head_of(model: Any) -> Any:
    """Return a model's head: the output embedding of a causal language model, or `score` of a classifier."""
    return model.get_output_embeddings() or getattr(model, "score", None)


def transforms(model: Any) -> bool:
    """Return whether a causal language model has weights between its decoder and its output embedding.

    Heads in the style of BERT have such weights.
    """
    known = {*model.base_model.parameters(), *head_of(model).parameters()}
    return not known.issuperset(model.parameters())


def without_head(model: Any) -> Callable[..., Any]:
    """Return a function that calls a causal language model without its output embedding.

    The result has the input of the output embedding as its `last_hidden_state`.
    """
    head = head_of(model)

    def call(**inputs: Any) -> SimpleNamespace:
        forward = vars(head).get("forward")
        head.forward = lambda hidden: hidden
        try:
            return SimpleNamespace(last_hidden_state=model(**inputs).logits)
        finally:
            del head.forward
            if forward is not None:
                head.forward = forward

    return call


def layers_of(decoder: Any) -> nn.ModuleList | None:
    """Return the list of a decoder's layers; None if there is none.

    The list is named `layers`, or is the outermost list with as many modules as the config has layers.
    """
    named, count = getattr(decoder, "layers", None), getattr(decoder.config, "num_hidden_layers", None)
    if isinstance(named, nn.ModuleList):
        return named
    lists = (part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    return next(lists, None)


def _outwards(name: str) -> list[str]:
    """Return the dotted name and the names of all modules around it, without the whole model."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
