"""Small models that vLLM can run, with heads as wide as its attention on CPUs needs them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.engines.rollout.base import generate
from tandem.engines.weight_sync import digest
from tandem.protocol import Request, Sample, SamplingParams
from tests.contract.world import SHAPE, VOCABULARY, log_probs
from tests.engines.rollout.case import stream  # vLLM pads the vocabulary to 128


def build(
    name: str = "qwen2", seed: int = 0, vocab_size: int = VOCABULARY, heads: tuple[int, int] = (2, 1)
) -> PreTrainedModel:
    """Build a float32 model with random biases and norms and so many query and key heads."""
    torch.manual_seed(seed)
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "intermediate_size": 96}
    shape |= {"vocab_size": vocab_size, "hidden_size": 64, "tie_word_embeddings": name == "qwen2"}
    if name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | shape | {"hidden_size": 32 * heads[0]}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | shape, head_dim=32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    """Save the model with a generation config that must be ignored."""
    eos = list(range(0, VOCABULARY, 2))
    model.generation_config = GenerationConfig(
        eos_token_id=eos, repetition_penalty=3.0, do_sample=True, top_k=3
    )
    model.save_pretrained(folder)
    return str(folder)


def make_requests(count: int, n: int = 1, **params: object) -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCABULARY, size=rng.integers(1, 40)) for _ in range(count)]
    settings = SamplingParams(**{"max_tokens": 12, **params})  # type: ignore[arg-type]
    return [Request(f"p{i}", k, prompt, settings) for i, prompt in enumerate(prompts) for k in range(n)]


def check_samples(model: PreTrainedModel, requests: Sequence[Request], samples: Iterable[Sample]) -> None:
    """Check that the log-probs are those of the model."""
    for request, sample in zip(requests, samples, strict=True):
        assert sample.id == request.id
        np.testing.assert_allclose(sample.log_probs, log_probs(model, request, sample), atol=1e-4, rtol=0)


def check_update(engine: Any, model: PreTrainedModel, version: int, change: Any = lambda _, t: t) -> None:
    """Give the engine new weights, and check that it holds them and samples from them."""
    assert engine.update_weights(stream(model, change), version) == digest(model.named_parameters())
    requests = make_requests(4, 2, temperature=0.9)
    samples = generate(engine, requests)
    check_samples(model, requests, samples)
    assert {version for sample in samples for version in sample.versions.tolist()} == {version}
