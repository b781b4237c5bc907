"""Small models that vLLM can run, with heads as wide as its attention on CPUs needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.engines.rollout.base import WeightStream
from tandem.protocol import Request, Sample, SamplingParams

Change = Callable[[str, Tensor], Tensor | None]

VOCABULARY = 97  # which vLLM pads to 128
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def build(
    name: str = "qwen2", seed: int = 0, vocab_size: int = VOCABULARY, heads: tuple[int, int] = (2, 1)
) -> PreTrainedModel:
    """Build a float32 model with random biases and norms. qwen2 has tied embeddings, qwen3 does not.

    Args:
        name: "qwen2" or "qwen3".
        seed: The seed of the weights.
        vocab_size: The size of the vocabulary.
        heads: The number of query heads, and the number of key and value heads.
    """
    torch.manual_seed(seed)
    shape = _SHAPE | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    if name == "qwen2":
        shape["hidden_size"] = 32 * heads[0]
        model: PreTrainedModel = Qwen2ForCausalLM(
            Qwen2Config(**shape, vocab_size=vocab_size, tie_word_embeddings=True)
        )
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(**shape, vocab_size=vocab_size, head_dim=32, tie_word_embeddings=False)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    """Save the model with a generation config that must be ignored."""
    model.generation_config = GenerationConfig(
        eos_token_id=list(range(0, VOCABULARY, 2)), repetition_penalty=3.0, do_sample=True, top_k=3
    )
    model.save_pretrained(folder)
    return str(folder)


def make_requests(count: int, n: int = 1, **params: object) -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCABULARY, size=rng.integers(1, 40)) for _ in range(count)]
    settings = SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type]
    return [Request(f"p{i}", k, prompt, settings) for i, prompt in enumerate(prompts) for k in range(n)]


def log_probs(model: PreTrainedModel, request: Request, sample: Sample) -> np.ndarray:
    """Return the log-probs (R), in nats, of the sample's tokens after temperature, by one forward."""
    ids = torch.from_numpy(np.concatenate((request.prompt_ids, sample.token_ids)))[None]
    with torch.no_grad():
        logits_RV = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
    scaled_RV = (logits_RV / request.params.temperature).log_softmax(-1)
    return scaled_RV.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0].numpy()


def stream(model: PreTrainedModel, change: Change = lambda _, tensor: tensor) -> WeightStream:
    """Return a stream of a model's weights. Weights that `change` turns into None are left out.

    Each tensor is overwritten when the next one is requested.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            tensor = change(name, parameter.detach().clone())
            if tensor is not None:
                yield name, tensor
                tensor.fill_(torch.nan)

    return WeightStream(tensors())
