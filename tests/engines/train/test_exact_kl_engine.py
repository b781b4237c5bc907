"""The exact KL on two ranks, under each division of model and tokens, compared with one rank."""

from dataclasses import dataclass

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.engines.train.base import REFERENCE
from tandem.models.parallel import init_distributed
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto
from tests.engines.train import matrix, synthetic
from tests.engines.train.on_ranks import on_ranks

DIVISIONS = {"qwen2": ("shards", "layers", "tokens"), "phi": ("shards", "tokens")}  # phi's head has a bias
OUTPUTS = ("ref_kl", "sum_pi_squared")


@dataclass
class ExactLoss:
    outputs: frozenset = frozenset({"log_probs", "ref_kl"})
    columns: frozenset = frozenset({"response_mask"})

    def __call__(self, out, columns, offsets, counts):
        return (out["ref_kl"] * columns["response_mask"]).sum() / counts.tokens, Metrics()


def compared(folder, division="shards"):
    """Take one update with the KL as loss; return the outputs of the rows before it, and weights after it."""
    policy, reference = (
        matrix.engine_of(folder, matrix.DIVISIONS[division], of=name, frozen=name == "reference")
        for name in ("policy", "reference")
    )
    batch = synthetic.make_batch()
    batch = batch.chunk(policy.share.size)[policy.share.rank].select(["tokens", "response_mask"], ())
    micro = synthetic.CUTS["three"]
    hidden = reference.forward(batch, outputs=frozenset({"hidden"}), micro=micro).ragged("hidden")
    policy.hold_reference_head(reference.output_head())
    batch = batch.union(DataProto({REFERENCE: hidden}))
    out = policy.forward(batch, outputs=frozenset(OUTPUTS), micro=micro)
    policy.train_step(batch, ExactLoss(), micro=micro)
    outputs = {name: out.ragged(name).values for name in OUTPUTS}
    return {"share": policy.share, "outputs": outputs, "weights": synthetic.weights(policy)}


@pytest.fixture(scope="module", params=DIVISIONS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(0)
    config = CONFIG_MAPPING[request.param](**synthetic.SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "policy")
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    for parameter in model.parameters():
        draw = torch.Generator().manual_seed(len(parameter))
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(folder / "reference")
    return folder


@pytest.fixture(scope="module")
def single(folder):
    init_distributed(torch.device("cpu"))
    return compared(folder)


def under_each(folder):
    return [compared(folder, division) for division in DIVISIONS[folder.name]]


@pytest.mark.slow
def test_two_ranks_find_what_one_finds_and_learn_the_same(folder, single):
    for ranks in zip(*on_ranks(under_each, folder), strict=True):
        assert single["outputs"]["ref_kl"].max() > 1e-2
        torch.testing.assert_close(matrix.led(ranks, "outputs"), single["outputs"], rtol=0, atol=1e-10)
        for found in ranks:
            assert synthetic.relative_difference(found["weights"], single["weights"]) < 1e-9
