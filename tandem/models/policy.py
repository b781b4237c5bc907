"""The policy: packed token ids in, log-probabilities and entropies out.

Shapes: N input tokens, K predicted tokens, T entries of the micro-batch's token column, D hidden features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ConfigError, EngineError
from tandem.models.heads import Head, token_log_probs
from tandem.models.heads.exact import kl_divergence, sum_pi_squared
from tandem.models.kernels import Kernels
from tandem.models.lora import plain_name, without_adapters
from tandem.models.packing import PackedInputs
from tandem.models.tensor_group import TensorGroup, local


class PackedModel(nn.Module):
    """A model over packed sequences. Only ids go in: FSDP may cast floating arguments.

    Attributes:
        kind: "policy", "value" or "score".
        outputs: what it can be asked for.
        whole_sequences: whether it judges sequences, and does not continue them; see `pack`.
        starts_at_zero: parameters that are no part of a folder.
        kernels: what computes layers and outputs.
    """

    kind: str
    outputs: frozenset[str]
    whole_sequences = False
    starts_at_zero: frozenset[str] = frozenset()
    kernels = Kernels()
    model: Any

    @property
    def decoder(self) -> Any:
        """The embedding, layers and norm below the head."""
        return self.model.model

    @property
    @abstractmethod
    def output_layer(self) -> Any:
        """The layer that makes outputs of a hidden state."""

    def check_outputs(self, asked: Iterable[str]) -> None:
        """
        Raises:
            EngineError: an output that this kind of model does not have.
        """
        unknown = sorted(set(asked) - self.outputs)
        if unknown:
            raise EngineError(
                f"a {self.kind} model has no such output", got=unknown, expected=sorted(self.outputs)
            )

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a parameter of this module."""
        return plain_name(name.removeprefix("model."))


class PolicyModel(PackedModel):
    """A causal language model and its head.

    Args:
        model: the transformers model, loaded with `attention=PACKED`.
        temperature: divides the logits of every output; that of the rollout.
        head: makes the outputs from the hidden states.

    Attributes:
        tensor_group: the ranks that share the layers, and the vocabulary; None: this one has all.
        reference_head: (V, D), the whole output embedding of the reference policy, in compute dtype, for
            `ref_kl`; None until it is given.

    Raises:
        ConfigError: a temperature of zero or below.
    """

    kind, outputs = "policy", frozenset({"log_probs", "entropy", "sum_pi_squared", "ref_kl", "hidden"})
    tensor_group: TensorGroup | None = None
    reference_head: Tensor | None = None

    def __init__(
        self, model: PreTrainedModel, *, temperature: float = 1.0, head: Head = token_log_probs
    ) -> None:
        super().__init__()
        if temperature <= 0:
            raise ConfigError(
                "log-probs for training need a positive temperature", field="temperature", got=temperature
            )
        self.model, self.temperature, self.head = model, temperature, head

    @property
    def decoder(self) -> Any:
        """The embedding, layers and norm below the head."""
        return self.model.get_decoder()

    @property
    def output_layer(self) -> Any:
        """The output embedding."""
        return self.model.get_output_embeddings()

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
        self.check_outputs(outputs)
        hidden_KD = decode(self.decoder, inputs).index_select(0, inputs.sources)
        weight = self.output_layer.weight
        options: Any = {"temperature": self.temperature, "group": self.tensor_group}
        log_probs_K, entropy_K = self.head(
            hidden_KD, weight, inputs.targets, with_entropy="entropy" in outputs, **options
        )
        found = {"log_probs": log_probs_K, "entropy": entropy_K, "hidden": hidden_KD}
        if "sum_pi_squared" in outputs:
            found["sum_pi_squared"] = sum_pi_squared(hidden_KD, local(weight), **options)
        if "ref_kl" in outputs:
            compared = self._reference(hidden_KD, inputs.reference)
            found["ref_kl"] = kl_divergence(hidden_KD, local(weight), *compared, **options)
        asked = {name: value for name, value in found.items() if name in outputs and value is not None}
        return {name: at_places(value, inputs) for name, value in asked.items()}

    def _reference(self, hidden_KD: Tensor, reference_KD: Tensor | None) -> tuple[Tensor, Tensor]:
        """The reference's hidden states, and its head, or this rank's part of it."""
        if self.reference_head is None or reference_KD is None:
            missing = "output head" if self.reference_head is None else "hidden states"
            raise EngineError(
                f"the KL to the reference needs its {missing}",
                expected="the reference's head held here, and its hidden states in the column ref_hidden",
            )
        other_head, group = self.reference_head, self.tensor_group
        if group is not None:
            other_head = other_head[group.entries(len(other_head))]
        return reference_KD.to(hidden_KD.dtype), other_head


@contextmanager
def varied(module: Any, *, adapter: bool, temperature: float | None) -> Iterator[None]:
    """Inside, the model computes without its adapters, or a policy at another temperature.

    Args:
        adapter: whether adapters count.
        temperature: None: the policy's own.
    """
    own = getattr(module, "temperature", None)
    with nullcontext() if adapter else without_adapters(module):
        if temperature is None:
            yield
            return
        module.temperature = temperature
        try:
            yield
        finally:
            module.temperature = own


def decode(decoder: Any, inputs: PackedInputs) -> Tensor:
    """(N, D) last hidden states, normalised, of the packed tokens."""
    return hidden_states(decoder, inputs).squeeze(0)


def hidden_states(decoder: Any, inputs: PackedInputs) -> Tensor:
    """(1, N, D): what the decoder makes of the tokens, or of the hidden states that stand for them."""
    tokens = {"input_ids": inputs.input_ids.unsqueeze(0)}
    out = decoder(
        **(tokens if inputs.hidden is None else {"inputs_embeds": inputs.hidden}),
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
