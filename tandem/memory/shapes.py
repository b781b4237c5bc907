"""The shape of a language model: the numbers of parameters, and the bytes of keys and values.

The shape is read from the model's config.json, or looked up by the name of a published model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandem.config.changed_models import stored_config
from tandem.errors import ConfigError
from tandem.memory.activations import Decoder, Experts, Latent
from tandem.memory.mixtures import mixture_of

_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings", "head_dim"),
)
_MATH = r"qwen2\.5(-math|-coder)?"
PUBLISHED: dict[str, tuple[Any, ...]] = {
    r"qwen2\.5(-coder)?-0\.5b": ("qwen2", 896, 4864, 24, 14, 2, 151936, True, 64),
    rf"{_MATH}-1\.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 128),
    r"r1-distill-qwen-1\.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151936, False, 128),
    r"qwen2\.5(-coder)?-3b": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 128),
    rf"({_MATH}|r1-distill-qwen)-7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 128),
    r"(qwen2\.5(-coder)?|r1-distill-qwen)-14b": ("qwen2", 5120, 13824, 48, 40, 8, 152064, False, 128),
    r"(qwen2\.5(-coder)?|r1-distill-qwen)-32b": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False, 128),
    rf"{_MATH}-72b": ("qwen2", 8192, 29568, 80, 64, 8, 152064, False, 128),
    r"qwen3-0\.6b": ("qwen3", 1024, 3072, 28, 16, 8, 151936, True, 128),
    r"qwen3-1\.7b": ("qwen3", 2048, 6144, 28, 16, 8, 151936, True, 128),
    r"qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 151936, True, 128),
    r"qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 128),
    r"qwen3-14b": ("qwen3", 5120, 17408, 40, 40, 8, 151936, False, 128),
    r"qwen3-32b": ("qwen3", 5120, 25600, 64, 64, 8, 151936, False, 128),
    r"qwen3-30b-a3b": ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, False, 128, 128, 8, 768),
    r"qwen3-235b-a22b": ("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, False, 128, 128, 8, 1536),
    r"(llama-3(\.1)?|r1-distill-llama)-8b": ("llama", 4096, 14336, 32, 32, 8, 128256, False, 128),
    r"(llama-3(\.[13])?|r1-distill-llama)-70b": ("llama", 8192, 28672, 80, 64, 8, 128256, False, 128),
    r"llama-3\.2-1b": ("llama", 2048, 8192, 16, 32, 8, 128256, True, 64),
    r"llama-3\.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128256, True, 128),
    r"mistral-7b(-instruct)?-v0\.[12]": ("mistral", 4096, 14336, 32, 32, 8, 32000, False, 128),
    r"mistral-7b": ("mistral", 4096, 14336, 32, 32, 8, 32768, False, 128),
    r"gemma-2-2b": ("gemma2", 2304, 9216, 26, 8, 4, 256000, True, 256),
    r"gemma-2-9b": ("gemma2", 3584, 14336, 42, 16, 8, 256000, True, 256),
    r"gemma-2-27b": ("gemma2", 4608, 36864, 46, 32, 16, 256000, True, 128),
    r"gemma-3-1b": ("gemma3_text", 1152, 6912, 26, 4, 1, 262144, True, 256),
    r"deepseek-(v3|r1)": ("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, False, None, None, 8, 2048),
}
"""A dict from a regular expression for names of published models to their config.json values.

The values belong to the keys in `_KEYS`, followed by the keys for experts.
"""

_EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_TIED = ("gemma", "gemma2", "gemma3_text")  # model types whose embeddings are tied by default


_MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 512},
    "deepseek_v3": {
        **{"n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8, "topk_group": 4},
        **{"first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    },
}
"""A dict from model_type to further values of the published models' config.json."""
_FULL_LAYERS = {"gemma2": 2, "gemma3_text": 6}  # each such layer has no window, if no other file says so

_BIASED_OUTPUT = ("llama", "llama4_text", "qwen3", "qwen3_moe", "gpt_oss", "dots1", "olmoe")

_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_norms": True},
    "qwen3_moe": {"head_norms": True},
    "gemma2": {"norms": 4, "norm_copies": 1, "scored": True},
    "gemma3_text": {"norms": 4, "norm_copies": 1, "head_norms": True},
    "olmo3": {"norm_copies": 1, "head_norms": True, "whole": True},
    "cohere2": {"norms": 1, "norm_copies": 2},
    "phi3": {"joined": True, "whole": True},
    "gpt_oss": {"norm_copies": 1, "gates": 7, "scored": True},
    "olmoe": {"head_norms": True, "whole": True},
    "minimax_m2": {"head_norms": True, "whole": True, "parted": True},
    "glm4_moe": {"parted": True},
    "dots1": {"head_norms": True},
}
"""A dict from model_type to the fields of `Decoder` that differ from Llama's."""


class LayerNumbers(NamedTuple):
    """The numbers of parameters of a layer.

    Attributes:
        split: in the matrices and biases that tensor parallelism splits.
        whole: in norms, the router and other parts that it does not split.
        experts: in all routed experts, which it does not split either.
    """

    split: int
    whole: int
    experts: int

    def on(self, ranks: int) -> float:
        """Return the numbers on one of `ranks` ranks that split the layer, without the routed experts."""
        return self.split / ranks + self.whole


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder with its embedding and head.

    Attributes:
        kind: the model_type.
        decoder: the layers. With experts, the width of the MLP is the total width of the experts that one
            token uses.
        vocabulary: number of vocabulary entries.
        tied: whether embedding and head are the same matrix.
        attention: number of weights in a layer's attention matrices.
        layer: the parameters of a layer; with experts, of a layer that has them.
        plain: the parameters of a layer with an ordinary MLP instead of experts.
        windows: for each layer, how many of the last tokens it needs; 0: all tokens.
    """

    kind: str
    decoder: Decoder
    vocabulary: int
    tied: bool
    attention: int
    layer: LayerNumbers
    plain: LayerNumbers
    windows: tuple[int, ...]

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding. An untied head has the same number."""
        return self.vocabulary * self.decoder.hidden

    @property
    def largest(self) -> int:
        """Number of parameters of the largest tensor: the embedding, or gate and up of a layer's experts."""
        return max(self.embedding, 2 * self.layer.experts // 3)

    @property
    def matrices(self) -> float:
        """Number of weights in the matrices of all layers that are used for a token."""
        own = self.decoder
        width = sum(share * (3 * kind.intermediate + kind.experts.number) for share, kind in own.kinds)
        return own.layers * (self.attention + own.hidden * width)

    @property
    def experts(self) -> int:
        """Number of parameters of all routed experts of all layers."""
        return (self.decoder.layers - self.decoder.plain) * self.layer.experts

    def streamed(self, ranks: int = 1) -> float:
        """Return the number of weights that products with many tokens read: all matrices, and the head.

        Args:
            ranks: number of ranks that divide the experts.
        """
        own = self.decoder
        used = (own.layers - own.plain) * 3 * own.hidden * own.experts.routed * own.experts.width
        return self.matrices - used + self.experts / ranks + self.embedding

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model. A tied matrix is counted once."""
        own, matrices = self.decoder, self.embedding * (1 if self.tied else 2)
        return (
            matrices + (own.layers - own.plain) * sum(self.layer) + own.plain * sum(self.plain) + own.hidden
        )

    def kv_bytes(self, itemsize: int, split: int = 1, *, latent: bool = False) -> float:
        """Return the bytes of a token's keys and values of each head in all layers.

        If `split` ranks split the heads, these are the bytes on one rank. A rank has at least one key head.

        Args:
            itemsize: bytes per element.
            split: number of ranks that split the heads.
            latent: whether the engine stores low-rank keys and values as they are, on each rank.

        Source: Kwon et al. 2023, "PagedAttention", https://arxiv.org/abs/2309.06180, section 3.
        """
        own = self.decoder
        if latent and own.latent.keys:
            return own.layers * (own.latent.keys + own.latent.angles) * itemsize
        return own.layers * max(1, own.key_heads / split) * own.widths * itemsize


def published(name: str) -> dict[str, Any] | None:
    """Return the config.json values of a published model, or None if the name is unknown.

    The result has the keys that `model_shape` reads. The name can be a name on the hub, such as
    Qwen/Qwen2.5-7B-Instruct, or the path of a folder with such a name.
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    for pattern, values in PUBLISHED.items():
        if re.search(rf"(?:^|-){pattern}(?![\w.])", last):
            given = zip((*_KEYS, *_EXPERT_KEYS), values, strict=False)
            found = {key: value for key, value in given if value is not None}
            return found | _MORE.get(found["model_type"], {})
    return None


@functools.cache
def shape_of(path: str) -> ModelShape:
    """Return the shape of a model, given the model's folder or its published name.

    Raises:
        ConfigError: there is no folder with a config.json, and the name is unknown.
    """
    stored = stored_config(path) or published(path)
    if stored is None:
        raise ConfigError(
            "this is neither a folder with a config.json nor the name of a known model",
            field="model.path",
            got=path,
            expected="a Hugging Face folder, or a name such as Qwen/Qwen2.5-7B, Qwen/Qwen3-8B, "
            "meta-llama/Llama-3.1-70B",
            remedy="copy the model's config.json into a folder, and give that folder",
        )
    return model_shape(stored)


def layer_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return for each layer the window or chunk of its attention, as config.json says it; 0: none.

    Files of older versions of transformers do not name the kind of each layer. There, every layer has the
    window, except each `sliding_window_pattern`-th layer, and in Qwen the first `max_window_layers` layers.
    """
    count, window = config["num_hidden_layers"], config.get("sliding_window") or 0
    kinds = config.get("layer_types")
    if kinds is not None:
        sizes = {"sliding_attention": window, "chunked_attention": config.get("attention_chunk_size") or 0}
        return tuple(sizes.get(kind, 0) for kind in kinds)
    if str(config.get("model_type")).startswith("qwen"):
        first = config.get("max_window_layers") or 0
        return tuple(window if config.get("use_sliding_window") and i >= first else 0 for i in range(count))
    every = config.get("sliding_window_pattern") or _FULL_LAYERS.get(str(config.get("model_type")), count + 1)
    return tuple(window if (i + 1) % every else 0 for i in range(count))


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model that a config.json describes.

    For a multimodal model, this is the shape of its text model. Symbols: D hidden features, H heads and K key
    heads of d features each, I features of the MLP. Each layer has: attention (see `_attention`); gate, up
    and down 3 D I; norms D each; and head norms 2 d in Qwen3 and Gemma 3, or (H + K) d in OLMo 3. With E
    experts, each expert has 3 D I parameters, and the router D E. gpt-oss has biases everywhere and sinks.

    Raises:
        ConfigError: a size is missing in config.json.
    """
    text = {**config, **(config.get("text_config") or {})}
    missing = [key for key in _KEYS[1:5] if not isinstance(text.get(key), int)] + (
        [] if isinstance(text.get("vocab_size"), int) else ["vocab_size"]
    )
    if missing:
        raise ConfigError(
            "a size is missing in the model's config.json, so its memory cannot be computed",
            field=missing[0],
            expected="a config.json of a decoder, with hidden_size, num_hidden_layers and the like",
        )
    decoder = _decoder(text)
    kind, hidden, experts = str(text.get("model_type")), decoder.hidden, decoder.experts
    tied = bool(text.get("tie_word_embeddings", kind in _TIED))
    attention, split, whole = _attention(text, decoder)
    numbers = []
    for of in (decoder, replace(decoder, intermediate=decoder.plain_width, experts=Experts())):
        mlp = 3 * hidden * of.dense + (2 * of.dense + hidden if text.get("mlp_bias") else 0)
        routed = 3 * hidden * experts.width + (2 * experts.width + hidden if kind == "gpt_oss" else 0)
        router = of.experts.number * (hidden + (kind in ("gpt_oss", "ernie4_5_moe")))
        alone = kind == "qwen2_moe" and of.experts.number > 0  # its shared expert is whole, and has a gate
        router += (mlp + hidden) * alone
        numbers.append(LayerNumbers(split + mlp * (not alone), whole + router, of.experts.number * routed))
    layer, plain = numbers
    windows = layer_windows(text)
    return ModelShape(kind, decoder, text["vocab_size"], tied, attention, layer, plain, windows)


def _decoder(text: Mapping[str, Any]) -> Decoder:
    """Return the layers of the language model that a config.json describes."""
    kind, hidden, heads = str(text.get("model_type")), text["hidden_size"], text["num_attention_heads"]
    key_heads, width = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    own = dict(_LAYERS.get(kind, {}))
    if all(isinstance(text.get(name), int) for name in _LATENT):
        keys, angles, plain, values = (text[name] for name in _LATENT)
        latent = Latent(text.get("q_lora_rank") or 0, keys, angles)
        own |= {"latent": latent, "value_width": values, "whole": True, "parted": True}
        key_heads, width = heads, plain + angles
    if text.get("use_qk_norm") and kind == "glm4_moe":
        own["head_norms"] = True
    mixture, inner = mixture_of(text), text["intermediate_size"]
    if mixture is not None:
        own |= {"experts": mixture.experts, "plain": mixture.plain, "plain_width": mixture.width}
        inner = mixture.experts.routed * mixture.experts.width + mixture.shared
    capped = bool(text.get("final_logit_softcapping", kind == "gemma2"))
    return Decoder(text["num_hidden_layers"], hidden, inner, heads, key_heads, width, capped=capped, **own)


def _attention(text: Mapping[str, Any], own: Decoder) -> tuple[int, int, int]:
    """Return the numbers of parameters of a layer's attention and norms: matrices, split parts, whole parts.

    Queries and output have 2 D H d weights, keys and values 2 D K d. Biases have (H + 2K) d in Qwen2, or for
    all linear layers if the config sets them. Low-rank queries, keys and values have two matrices and a norm
    in between, which tensor parallelism does not split.
    """
    kind, hidden, latent = str(text.get("model_type")), own.hidden, own.latent
    query, keys = own.heads * own.head_width, own.key_heads * own.head_width
    biased = text.get("attention_bias", text.get("qkv_bias", kind.startswith(("qwen2", "gpt_oss"))))
    norms = own.norms * hidden + (own.heads if kind == "gpt_oss" else 0)
    if latent.keys:
        first = hidden * ((latent.queries or query) + latent.keys + latent.angles)
        heads = own.heads * (own.widths - latent.angles)
        matrices = first + latent.queries * query + latent.keys * heads + own.heads * own.value_width * hidden
        norms += latent.queries + latent.keys
        return (
            matrices,
            0,
            matrices + norms + biased * (latent.queries + latent.keys + latent.angles + hidden),
        )
    matrices = 2 * hidden * (query + keys)
    split = matrices + ((query + 2 * keys) + hidden * (kind in _BIASED_OUTPUT) if biased else 0)
    norms += (query + keys if own.whole else 2 * own.head_width) * own.head_norms
    return matrices, split, norms
