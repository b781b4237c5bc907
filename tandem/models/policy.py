"""The policy model: packed token ids in, log-probs and entropies out.

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
    """A model over packed sequences. Its inputs are ids only, because FSDP may cast floating-point arguments.

    Attributes:
        kind: "policy", "value" or "score".
        outputs: the names of its outputs.
        whole_sequences: whether the model scores sequences instead of predicting tokens; see `pack`.
        starts_at_zero: parameters that a model folder does not hold.
        kernels: the kernels that compute the layers and outputs.
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
        """The layer that computes outputs from a hidden state."""

    def check_outputs(self, asked: Iterable[str]) -> None:
        """Check that the model has the outputs.

        Raises:
            EngineError: If this kind of model lacks one of them.
        """
        unknown = sorted(set(asked) - self.outputs)
        if unknown:
            raise EngineError(
                f"a {self.kind} model does not have this output", got=unknown, expected=sorted(self.outputs)
            )

    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of a parameter of this module."""
        return plain_name(name.removeprefix("model."))


class PolicyModel(PackedModel):
    """A causal language model and its head.

    Args:
        model: the transformers model, loaded with `attention=PACKED`.
        temperature: divides the logits of every output; use the temperature of the rollout.
        head: computes the outputs from the hidden states.

    Attributes:
        tensor_group: the ranks that share the layers and the vocabulary; None: this rank has the whole model.
        reference_head: (V, D), the whole output embedding of the reference policy, in compute dtype, for
            `ref_kl`; None until it is set.

    Raises:
        ConfigError: If the temperature is not above zero.
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
                "the temperature must be positive in training", field="temperature", got=temperature
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
        """Return the wanted outputs, each (T) in fp32 (fp64 for an fp64 model).

        Entries are zero at tokens that were not asked for.

        Args:
            inputs: the packed micro-batch.
            outputs: names among these: "log_probs" and "entropy", in nats; "sum_pi_squared", without
                gradient; "ref_kl", KL(policy || reference) in nats. All are of the distribution from which
                the token was drawn. "hidden" is (T, D), the last hidden state that predicts the token, in the
                compute dtype.

        Raises:
            EngineError: If a policy does not have an output, or the reference's data for it is missing.
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
        return {name: at_positions(value, inputs) for name, value in asked.items()}

    def _reference(self, hidden_KD: Tensor, reference_KD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the reference's hidden states and its head, or this rank's part of the head."""
        if self.reference_head is None or reference_KD is None:
            missing = "output head" if self.reference_head is None else "hidden states"
            raise EngineError(
                f"the KL to the reference needs the reference's {missing}",
                expected="the reference's head on this rank, and its hidden states in the column ref_hidden",
            )
        other_head, group = self.reference_head, self.tensor_group
        if group is not None:
            other_head = other_head[group.entries(len(other_head))]
        return reference_KD.to(hidden_KD.dtype), other_head


@contextmanager
def varied(module: Any, *, adapter: bool, temperature: float | None) -> Iterator[None]:
    """Inside the context, let the model compute without its adapters or at another temperature.

    Args:
        module: the model.
        adapter: whether the adapters are active.
        temperature: the temperature of a policy; None: the policy's own.
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
    """Return (N, D) the last hidden states of the packed tokens, after the final norm."""
    return hidden_states(decoder, inputs).squeeze(0)


def hidden_states(decoder: Any, inputs: PackedInputs) -> Tensor:
    """Return (1, N, D) the decoder's output for the tokens, or for the hidden states that replace them."""
    tokens = {"input_ids": inputs.input_ids.unsqueeze(0)}
    out = decoder(
        **(tokens if inputs.hidden is None else {"inputs_embeds": inputs.hidden}),
        position_ids=inputs.packing.position_ids.unsqueeze(0),
        use_cache=False,
        packing=inputs.packing,
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


def at_positions(values_K: Tensor, inputs: PackedInputs) -> Tensor:
    """Return the values at their positions in the token column, with zero elsewhere.

    If ranks share the tokens, every rank gets the values of all ranks.

    Args:
        values_K: (K) or (K, D), the values of the predicted tokens.
        inputs: the packed micro-batch, which has the positions.

    Returns:
        (T) or (T, D).
    """
    values_T = values_K.new_zeros(inputs.total, *values_K.shape[1:])
    values_T = values_T.index_copy(0, inputs.places, values_K)
    split = inputs.packing.split
    return values_T if split is None else split.gather(values_T)
