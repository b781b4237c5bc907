"""The exact KL on two ranks, under each division of model and tokens, compared with one rank."""

import exact_job as job
import pytest
import synthetic
import torch

from tandem.models.parallel import init_distributed
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    synthetic.save_model(folder / "policy")
    model = synthetic.AutoModelForCausalLM.from_pretrained(folder / "policy")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(len(parameter))
        )
    model.save_pretrained(folder / "reference")
    return folder


@pytest.fixture(scope="module")
def single(folder):
    init_distributed(torch.device("cpu"))
    return job.compared(folder)


@pytest.fixture(scope="module")
def two_ranks(folder):
    run_ranks(job.__file__, folder, folder / "results.pt")
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.parametrize("division", list(job.DIVISIONS))
def test_two_ranks_find_what_one_finds_and_learn_the_same(division, single, two_ranks):
    _, outputs, weights = single
    found, learnt = two_ranks[division]
    assert outputs["ref_kl"].max() > 1e-2
    for name in job.OUTPUTS:
        torch.testing.assert_close(found[name], outputs[name], rtol=0, atol=1e-10)
    assert synthetic.relative_difference(learnt, weights) < 1e-9
