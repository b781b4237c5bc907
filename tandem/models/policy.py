"""The policy model, which computes log-probs and entropies of packed token ids.

Shapes: N input tokens, K predicted tokens, T entries of the micro-batch's token column, D hidden features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import ConfigError, EngineError
from tandem.models.decoders import decoder_name, layers_of, transforms, without_head
from tandem.models.heads import Head, token_log_probs
from tandem.models.heads.exact import kl_divergence, sum_pi_squared
from tandem.models.kernels import Kernels
from tandem.models.logits import LogitRule, for_bias, with_bias
from tandem.models.lora import plain_name, without_adapters
from tandem.models.masks import attending
from tandem.models.packing import PackedInputs
from tandem.models.routing import MISSED, NO_MIXTURES, ROUTED, Mixtures, Routing
from tandem.models.tensor_group import TensorGroup, local


class PackedModel(nn.Module):
    """The base class of models over packed sequences.

    All inputs are integer ids, because FSDP may cast floating-point arguments.

    Args:
        model: a model of transformers.

    Attributes:
        model: the model, or the part of it that is used.
        mixtures: the mixtures of the model; none if the model was not built by `tandem.models.loading`.
        kind: the type of the model: "policy", "value" or "score".
        outputs: the names of its outputs.
        replays: the columns whose values replace what the model would choose itself.
        whole_sequences: whether the model scores sequences instead of predicting tokens; see `pack`.
        starts_at_zero: the names of parameters that no model folder contains. They are initialized with
            zeros.
        kernels: the kernels that compute the layers and outputs.
        in_rows: whether each sequence gets a row of its own, padded on the right, for an architecture whose
            sequences cannot be packed (see `may_pack`). The padding is computed too.
    """

    kind: str
    outputs: frozenset[str]
    replays: frozenset[str] = frozenset()
    whole_sequences = False
    starts_at_zero: frozenset[str] = frozenset()
    kernels = Kernels()
    in_rows = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder_name = decoder_name(model)
        self.model = model
        self.mixtures: Mixtures = getattr(model, "mixtures", NO_MIXTURES)

    @property
    def decoder(self) -> Any:
        """The decoder: embedding, layers and final norm, without the head."""
        return self.model.get_submodule(self.decoder_name)

    @property
    def layers(self) -> Any:
        """The decoder's list of layers."""
        return layers_of(self.decoder)

    @property
    @abstractmethod
    def output_layer(self) -> Any:
        """The layer that computes outputs from hidden states."""

    @property
    def trunk(self) -> Callable[..., Any]:
        """The function that computes the states that the output layer reads."""
        decoder: Callable[..., Any] = self.decoder
        return decoder

    def check_outputs(self, asked: Iterable[str]) -> None:
        """Check that the model has all the outputs in `asked`.

        Raises:
            EngineError: If this type of model does not have one of the outputs.
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
    """A causal language model with the head that computes log-probs and entropies.

    Args:
        model: the transformers model, loaded with `attention=PACKED`.
        temperature: the divisor of all logits. Use the temperature of the rollout.
        head: the function that computes log-probs and entropies from hidden states; see `Head`.

    Attributes:
        tensor_group: the tensor-parallel group of ranks that split the layers and the vocabulary; None: this
            rank has the whole model.
        rule: the rule by which the model computes logits.
        reference_head: the whole output embedding of the reference policy from `with_bias`, in compute dtype,
            for `ref_kl`; None until it is set.

    Raises:
        ConfigError: If the temperature is not above zero.
    """

    kind = "policy"
    outputs = frozenset({"log_probs", "entropy", "sum_pi_squared", "ref_kl", "hidden", ROUTED, MISSED})
    replays = frozenset({ROUTED})
    tensor_group: TensorGroup | None = None
    reference_head: Tensor | None = None

    def __init__(
        self, model: PreTrainedModel, *, temperature: float = 1.0, head: Head = token_log_probs
    ) -> None:
        super().__init__(model)
        if temperature <= 0:
            raise ConfigError(
                "the temperature must be positive in training", field="temperature", got=temperature
            )
        self.temperature, self.head, self.rule = temperature, head, LogitRule.of(model.config)
        self._transforms = transforms(model)

    @property
    def trunk(self) -> Callable[..., Any]:
        """The decoder, or the whole model without its output embedding if its head transforms the states."""
        return without_head(self.model) if self._transforms else super().trunk

    @property
    def output_layer(self) -> Any:
        """The output embedding."""
        return self.model.get_output_embeddings()

    def forward(self, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        """Compute the named outputs, each (T) in fp32 (fp64 for an fp64 model).

        Entries are zero at tokens whose outputs are not needed.

        Args:
            inputs: the packed micro-batch.
            outputs: names of outputs. "log_probs" and "entropy" are in nats. "sum_pi_squared" has no
                gradient. "ref_kl" is KL(policy || reference) in nats. All of these belong to the distribution
                that predicts the token. "hidden" is (T, D), the last hidden state that predicts the token, in
                the compute dtype. "routed_experts" is (T, L, K) integers, see `ROUTED`; "missed_experts" is
                (T) int64, see `MISSED`, and needs experts to replay.

        Raises:
            EngineError: If a policy does not have one of the outputs, or the reference's data for "ref_kl"
                are missing.
            ModelError: If the choice of experts cannot be recorded.
        """
        self.check_outputs(outputs)
        routing = inputs.routing or Routing()
        if ROUTED in outputs:
            routing.records = True
            inputs = replace(inputs, routing=routing)
        hidden_KD = decode(self, inputs).index_select(0, inputs.sources)
        weight = with_bias(self.output_layer.weight, self.output_layer.bias)
        states_KD = for_bias(hidden_KD, weight)
        options: Any = {**self.rule.at(self.temperature), "group": self.tensor_group}
        log_probs_K, entropy_K = self.head(
            states_KD, weight, inputs.targets, with_entropy="entropy" in outputs, **options
        )
        found = {"log_probs": log_probs_K, "entropy": entropy_K, "hidden": hidden_KD}
        if "sum_pi_squared" in outputs:
            found["sum_pi_squared"] = sum_pi_squared(states_KD, local(weight), **options)
        if "ref_kl" in outputs:
            compared = self._reference(hidden_KD, inputs.reference)
            found["ref_kl"] = kl_divergence(states_KD, local(weight), *compared, **options)
        asked = {name: value for name, value in found.items() if name in outputs and value is not None}
        columns = {name: at_positions(value, inputs) for name, value in asked.items()}
        if ROUTED in outputs:
            columns[ROUTED] = at_origins(self.mixtures.recorded(routing), inputs)
        if MISSED in outputs:
            columns[MISSED] = at_origins(torch.stack(list(routing.missed.values())).sum(0), inputs)
        return columns

    def _reference(self, hidden_KD: Tensor, reference_KD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the reference's hidden states, and its output embedding or this rank's rows of it."""
        if self.reference_head is None or reference_KD is None:
            missing = "output head" if self.reference_head is None else "hidden states"
            raise EngineError(
                f"the KL to the reference needs the reference's {missing}",
                expected="the reference's head on this rank, and its hidden states in the column ref_hidden",
            )
        other_head, group = self.reference_head, self.tensor_group
        if group is not None:
            other_head = other_head[group.entries(len(other_head))]
        return for_bias(reference_KD.to(hidden_KD.dtype), other_head), other_head


@contextmanager
def varied(module: Any, *, adapter: bool, temperature: float | None) -> Iterator[None]:
    """Inside the context, make the model compute without adapters or with another temperature.

    Args:
        module: the model.
        adapter: whether the adapters are active.
        temperature: the temperature of a policy; None: the policy's configured temperature.
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


def decode(module: PackedModel, inputs: PackedInputs) -> Tensor:
    """Run the decoder and return (N, D) the last hidden states of the packed tokens, after the norm.

    With gradients, the model's mixtures keep the inputs' routing, because recomputed layers need it. Reset it
    after the backward pass.
    """
    module.mixtures.routing = inputs.routing
    run = in_rows if module.in_rows else hidden_states
    hidden_1ND = run(module.trunk, inputs)
    if not torch.is_grad_enabled():
        module.mixtures.routing = None
    return hidden_1ND.squeeze(0)


def hidden_states(decoder: Any, inputs: PackedInputs) -> Tensor:
    """Return (1, N, D) the decoder's output for the token ids, or for an earlier stage's hidden states."""
    tokens = {"input_ids": inputs.input_ids.unsqueeze(0)}
    positions_1N = inputs.packing.position_ids.unsqueeze(0)
    with attending(inputs.packing):
        out = decoder(
            **(tokens if inputs.hidden is None else {"inputs_embeds": inputs.hidden}),
            attention_mask=torch.ones_like(positions_1N, dtype=torch.bool),
            position_ids=positions_1N,
            use_cache=False,
        )
    hidden: Tensor = out.last_hidden_state
    return hidden


def in_rows(decoder: Any, inputs: PackedInputs) -> Tensor:
    """Return (1, N, D) the decoder's output if each sequence has a row of its own, padded on the right.

    Each token depends only on earlier tokens, so padding on the right needs no mask.
    """
    packing = inputs.packing
    places_N = packing.places_in_rows()
    shape = (len(packing.lengths), packing.max_length)
    ids_BT = inputs.input_ids.new_zeros(shape).flatten().index_copy(0, places_N, inputs.input_ids).view(shape)
    if inputs.routing is not None:
        inputs.routing.spread(places_N, ids_BT.numel())
    out = decoder(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    hidden_BTD: Tensor = out.last_hidden_state
    return hidden_BTD.flatten(0, 1).index_select(0, places_N).unsqueeze(0)


def at_positions(values_K: Tensor, inputs: PackedInputs) -> Tensor:
    """Scatter values to their positions in the token column, with zero elsewhere.

    If ranks share the tokens (sequence parallelism), every rank gets the values of all ranks.

    Args:
        values_K: (K) or (K, D), the values of the predicted tokens.
        inputs: the packed micro-batch, which has the positions.

    Returns:
        (T) or (T, D), the token column.
    """
    values_T = values_K.new_zeros(inputs.total, *values_K.shape[1:])
    values_T = values_T.index_copy(0, inputs.places, values_K)
    split = inputs.packing.split
    return values_T if split is None else split.gather(values_T)


def at_origins(values_N: Tensor, inputs: PackedInputs) -> Tensor:
    """Return (T, …) the integers of the input tokens at their positions in the token column, else zero.

    Args:
        values_N: (N, …) integers.
        inputs: the packed micro-batch, with origins. With sequence parallelism, every rank gets the values of
            all ranks.
    """
    assert inputs.origins is not None
    places_N = inputs.origins.where(inputs.origins >= 0, inputs.total)
    found = values_N.new_zeros(inputs.total + 1, *values_N.shape[1:]).index_copy(0, places_N, values_N)[:-1]
    split = inputs.packing.split
    return found if split is None else split.gather(found.int()).to(found.dtype)
