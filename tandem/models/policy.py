"""The policy: packed token ids in, log-probabilities and entropies out.

Shapes: N input tokens, K predicted tokens, T entries of the micro-batch's token column, D hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ConfigError, EngineError
from tandem.models.heads import Head, token_log_probs
from tandem.models.heads.exact import kl_divergence, sum_pi_squared
from tandem.models.heads.tiled import Tiles, tiles_for
from tandem.models.kernels import Kernels
from tandem.models.lora import plain_name, without_adapters
from tandem.models.packing import PackedInputs
from tandem.models.tensor_group import TensorGroup, local
from tandem.models.vocab_parallel import own_entries, split_token_log_probs

POLICY_OUTPUTS = frozenset({"log_probs", "entropy", "sum_pi_squared", "ref_kl", "hidden"})


class PolicyModel(nn.Module):
    """A causal language model and its head. Only ids go in: FSDP may cast floating arguments.

    Args:
        model: the transformers model, loaded with `attention=PACKED`.
        temperature: divides the logits of every output; that of the rollout.
        head: makes the outputs from the hidden states.
        tiles: gives, for states of a type, the work on a part of the vocabulary, where ranks share it out.

    Attributes:
        kernels: what computes layers and outputs.
        tensor_group: the ranks that share the layers, and the vocabulary; None: this one has all.
        reference_head: (V, D), the whole output embedding of the reference policy, in compute dtype, for
            `ref_kl`; None until it is given.

    Raises:
        ConfigError: a temperature of zero or below.
    """

    whole_sequences = False
    kernels = Kernels()
    starts_at_zero: frozenset[str] = frozenset()
    tensor_group: TensorGroup | None = None
    reference_head: Tensor | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        head: Head = token_log_probs,
        tiles: Callable[[torch.dtype], Tiles] = tiles_for,
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ConfigError(
                "log-probs for training need a positive temperature", field="temperature", got=temperature
            )
        self.model: Any = model
        self.temperature = temperature
        self.head, self.tiles = head, tiles

    @property
    def decoder(self) -> Any:
        """The embedding, layers and norm below the head."""
        return self.model.get_decoder()

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """The wanted outputs, each (T) in fp32 (fp64 for an fp64 model); zero at tokens that were not asked
        for.

        Args:
            outputs: of "log_probs" and "entropy", nats; "sum_pi_squared", without gradient; "ref_kl", nats,
                KL(policy || reference); all of the distribution the token was drawn from. "hidden": (T, D),
                the last hidden state that predicts the token, in the compute dtype.

        Raises:
            EngineError: an output that a policy does not have, or that lacks the reference's part.
        """
        check_outputs(outputs, POLICY_OUTPUTS, "policy")
        hidden_KD = decode(self.decoder, inputs).index_select(0, inputs.sources)
        weight = self.model.get_output_embeddings().weight
        options: Any = {"temperature": self.temperature, "with_entropy": "entropy" in outputs}
        if self.tensor_group is None:
            log_probs_K, entropy_K = self.head(hidden_KD, weight, inputs.targets, **options)
        else:
            log_probs_K, entropy_K = split_token_log_probs(
                hidden_KD, weight, inputs.targets, self.tensor_group, self.tiles(hidden_KD.dtype), **options
            )
        found = {"log_probs": log_probs_K, "entropy": entropy_K, "hidden": hidden_KD}
        if "sum_pi_squared" in outputs:
            found["sum_pi_squared"] = sum_pi_squared(
                hidden_KD, local(weight), temperature=self.temperature, group=self.tensor_group
            )
        if "ref_kl" in outputs:
            found["ref_kl"] = self._reference_kl(hidden_KD, weight, inputs.reference)
        return {
            name: at_places(value, inputs)
            for name, value in found.items()
            if name in outputs and value is not None
        }

    def _reference_kl(self, hidden_KD: Tensor, weight: Tensor, reference_KD: Tensor | None) -> Tensor:
        """(K) nats."""
        if self.reference_head is None or reference_KD is None:
            missing = "output head" if self.reference_head is None else "hidden states"
            raise EngineError(
                f"the KL to the reference needs its {missing}",
                expected="the reference's head held here, and its hidden states in the column ref_hidden",
            )
        other_head, group = self.reference_head, self.tensor_group
        if group is not None:
            other_head = other_head[own_entries(len(other_head), group)]
        return kl_divergence(
            hidden_KD,
            local(weight),
            reference_KD.to(hidden_KD.dtype),
            other_head,
            temperature=self.temperature,
            group=group,
        )

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a parameter of this module."""
        return plain_name(name.removeprefix("model."))


@contextmanager
def varied(module: Any, *, adapter: bool, temperature: float | None) -> Iterator[None]:
    """Inside, the model computes without its adapters, or a policy at another temperature.

    Args:
        adapter: whether adapters count.
        temperature: None: the policy's own.
    """
    own = getattr(module, "temperature", None)
    with nullcontext() if adapter else without_adapters(module):
        if temperature is not None:
            module.temperature = temperature
        try:
            yield
        finally:
            if temperature is not None:
                module.temperature = own


def decode(decoder: Any, inputs: PackedInputs) -> Tensor:
    """(N, D) last hidden states, normalised, of the packed tokens."""
    return hidden_states(decoder, inputs).squeeze(0)


def hidden_states(decoder: Any, inputs: PackedInputs) -> Tensor:
    """(1, N, D): what the decoder makes of the tokens, or of the hidden states that stand for them."""
    ids = inputs.input_ids.unsqueeze(0)
    out = decoder(
        **({"input_ids": ids} if inputs.hidden is None else {"inputs_embeds": inputs.hidden}),
        position_ids=inputs.packing.position_ids.unsqueeze(0),
        use_cache=False,
        packing=inputs.packing,
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


def at_places(values_K: Tensor, inputs: PackedInputs) -> Tensor:
    """(T), or (T, D) of (K, D): the values at the tokens they concern, zero elsewhere; on every rank those of
    all ranks that share the tokens."""
    values_T = values_K.new_zeros(inputs.total, *values_K.shape[1:])
    values_T = values_T.index_copy(0, inputs.places, values_K)
    split = inputs.packing.split
    return values_T if split is None else split.gather(values_T)


def check_outputs(asked: Iterable[str], known: frozenset[str], kind: str) -> None:
    unknown = sorted(set(asked) - known)
    if unknown:
        raise EngineError(f"a {kind} model has no such output", got=unknown, expected=sorted(known))
