"""Models, tokenizer and requests for the contract of rollout engines, and the check of a sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tandem.engines.rollout.base import RolloutEngine, WeightSource
from tandem.engines.rollout.draws.keyed import first_position, row_key, uniforms
from tandem.protocol import Request, Sample, SamplingParams
from tests.contract.reference import Distribution, distribution

VOCABULARY = 97
EOS = 96
MAX_LENGTH = 96
MODES = ("processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits")


@dataclass(frozen=True)
class World:
    """A random causal LM in float32, the same with other weights, and its checkpoint of characters."""

    module: PreTrainedModel
    other: PreTrainedModel
    folder: Path
    tokenizer: PreTrainedTokenizerFast

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


@dataclass(frozen=True)
class EngineKind:
    """How an engine is created, and which parts of the contract it supports."""

    name: str
    make: Callable[..., RolloutEngine]  # from the world and any of the engines' four limits and modes
    source: Callable[[PreTrainedModel], WeightSource] | None  # None if its weights cannot be changed
    keyed: bool = True  # whether a token's key determines the token; else a generator of the request's seed
    recomputes: bool | None = False  # whether new weights recompute running sequences; None is not checked
    seeded: bool = True  # whether a sample depends only on its request and the weights
    untruncated: bool = True  # whether samples have `untruncated_log_probs`
    modes: tuple[str, ...] = MODES
    tolerance: float = 1e-4  # in nats, against a full forward pass in float32
    distribution: Callable[..., Distribution] = distribution  # what the engine means by the parameters

    def __str__(self) -> str:
        return self.name


SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 256}
SHAPE |= {"initializer_range": 0.2}  # large enough for peaked distributions


def make_model(seed: int, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    others = {"initializer_range": 0.15, "tie_word_embeddings": False, "eos_token_id": EOS}
    config = Qwen2Config(**SHAPE | sizes | others | changes, bos_token_id=None)
    return Qwen2ForCausalLM(config).float().eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [chr(0x100 + i) for i in range(EOS)] + ["<eos>"]
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token=tokens[0])


def prompt(index: int, length: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(index)
    return rng.integers(0, EOS, size=length or rng.integers(1, 30))


def requests_of(params: SamplingParams, prompts: int, n: int = 1, name: str = "p") -> list[Request]:
    return [Request(f"{name}{i}", j, prompt(i), params) for i in range(prompts) for j in range(n)]


def logits_of(module: PreTrainedModel, request: Request, token_ids: np.ndarray) -> np.ndarray:
    """Return the module's logits before each of the tokens, (R, V) float64, from one full forward pass."""
    ids = torch.from_numpy(np.concatenate((request.prompt_ids, token_ids)))[None]
    with torch.no_grad():
        return module(ids).logits[0, len(request.prompt_ids) - 1 : -1].double().numpy()


def log_probs(module: PreTrainedModel, request: Request, sample: Sample) -> np.ndarray:
    """Return the log-probs (R) of the sample's tokens after temperature, from one full forward pass."""
    rows = torch.from_numpy(logits_of(module, request, sample.token_ids) / request.params.temperature)
    return rows.log_softmax(-1).gather(1, torch.from_numpy(sample.token_ids)[:, None])[:, 0].numpy()


def check_tokens(
    request: Request,
    sample: Sample,
    logits: Iterable[np.ndarray],
    tolerance: float,
    keyed: bool = True,
    untruncated: bool = True,
    meaning: Callable[..., Distribution] = distribution,
) -> None:
    """Check every token against the reference distribution, given the logits before it; and the end."""
    params, tokens = request.params, sample.token_ids.tolist()
    assert sample.id == request.id
    assert len(sample.log_probs) == len(sample.versions) == len(tokens)
    keys = np.full(len(tokens), row_key(request), dtype=np.uint64)
    numbers = uniforms(keys, first_position(request) + np.arange(len(tokens)))
    for t, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        _, probabilities, whole = meaning(row, params, request.prompt_ids.tolist(), tokens[:t])
        assert probabilities[token] > 0, (params, t)
        assert sample.log_probs[t] == pytest.approx(np.log(probabilities[token]), abs=tolerance)
        if params.greedy:
            assert probabilities[token] >= probabilities.max() - tolerance
        elif keyed:
            low = probabilities[:token].sum()
            assert low - tolerance <= numbers[t] <= low + probabilities[token] + tolerance
        if untruncated:
            assert sample.untruncated_log_probs is not None
            assert sample.untruncated_log_probs[t] == pytest.approx(np.log(whole[token]), abs=tolerance)
    stops = [t for t, token in enumerate(tokens) if token in params.stop_token_ids and t >= params.min_tokens]
    assert stops in ([], [len(tokens) - 1])
    if sample.finish_reason != "abort":
        assert sample.finish_reason == ("stop" if stops else "length")
        assert stops or len(tokens) == params.max_tokens


def check_sample(kind: EngineKind, module: PreTrainedModel, request: Request, sample: Sample) -> None:
    logits = logits_of(module, request, sample.token_ids)
    kept = (kind.tolerance, kind.keyed, kind.untruncated, kind.distribution)
    check_tokens(request, sample, logits, *kept)


def _params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **others)


LIKELY = {"logit_bias": tuple((token, 3.0) for token in range(0, 20, 4))}
ALL = {"temperature": 1.3, "min_p": 0.02, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 9}
ALL |= {"presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 4, "stop_token_ids": (3, 40, 41)}
PARAMS = {
    "plain": _params(10),
    "hot": _params(10, temperature=1.7),
    "cold": _params(10, temperature=0.5, seed=4),
    "greedy": _params(10, temperature=0.0),
    "top_k": _params(10, temperature=0.8, top_k=5),
    "top_p": _params(10, top_p=0.7),
    "min_p": _params(10, min_p=0.1),
    "repetition": _params(14, repetition_penalty=1.8),
    "presence": _params(14, presence_penalty=1.5, **LIKELY),
    "frequency": _params(14, frequency_penalty=1.2, **LIKELY),
    "rewarded": _params(14, repetition_penalty=0.6, frequency_penalty=-1.0),
    "bias": _params(10, logit_bias=((7, 5.0), (8, -4.0), (90, 4.5))),
    "min_tokens": _params(12, min_tokens=8, stop_token_ids=tuple(range(0, 90, 2))),
    "greedy_edited": _params(14, temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, **LIKELY),
    "everything": _params(14, **ALL, logit_bias=((3, 2.0), (40, 2.0), (50, 1.0))),
}
