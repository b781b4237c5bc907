"""The exact KL on two ranks, however they divide model and tokens, against one rank in this process."""

import os
import subprocess
import sys
from pathlib import Path

import exact_job as job
import pytest
import synthetic
import torch

from tandem.models.parallel import init_distributed


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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(Path(job.__file__)), str(folder), str(folder / "results.pt")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.parametrize("division", list(job.DIVISIONS))
def test_two_ranks_find_what_one_finds_and_learn_the_same(division, single, two_ranks):
    _, outputs, weights = single
    found, learnt = two_ranks[division]
    assert outputs["ref_kl"].max() > 1e-2
    for name in job.OUTPUTS:
        torch.testing.assert_close(found[name], outputs[name], rtol=0, atol=1e-10)
    assert synthetic.relative_difference(learnt, weights) < 1e-9
