"""Two ranks load a model, and neither ever holds more than its half of it.

Checkpoints resume on fewer ranks, also those that were written while training went on.
"""

from pathlib import Path

import pytest
import synthetic
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.protocol import DataProto
from tests.support.ranks import run_ranks

JOB = Path(__file__).with_name("sharded_job.py")
LARGE = {
    "vocab_size": 31,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """Save a model of 90 MB in several files."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**LARGE))
    model.save_pretrained(folder, max_shard_size="30MB")
    return folder


@pytest.mark.slow
def test_no_rank_holds_more_than_its_half(folder, large_folder, tmp_path):
    run_ranks(JOB, "load", folder, large_folder, tmp_path)
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in (0, 1))
    stored = {}
    for file in large_folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            stored |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    stored_bytes = sum(value.nbytes for value in stored.values())
    assert stored_bytes > 80e6
    whole = 2 * stored_bytes  # the model is loaded in fp64
    for record in (first, second):
        assert 0.49 * stored_bytes < record["bytes_read"] < 0.51 * stored_bytes
        assert 0.49 * whole < record["own"] < 0.51 * whole
        assert 0.45 * whole < record["grown"] < 0.65 * whole
        assert record["weights"].keys() == stored.keys()
        assert all(torch.equal(record["weights"][name], value.double()) for name, value in stored.items())
        assert record["head"].shape == (1, LARGE["hidden_size"]) and record["head"].abs().max() == 0
    assert first["bytes_read"] + second["bytes_read"] == stored_bytes
    model = AutoModelForCausalLM.from_pretrained(large_folder)
    wanted = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    assert wanted and first["buffers"].keys() == wanted.keys()
    assert all(torch.equal(first["buffers"][name], buffer) for name, buffer in wanted.items())
    engine = synthetic.make_engine(large_folder, precision="fp64", frozen=True)
    tokens = DataProto({"tokens": synthetic.make_batch().ragged("tokens")})
    out = engine.forward(tokens, outputs=frozenset({"log_probs"}), micro=synthetic.CUTS["three"])
    assert torch.allclose(first["log_probs"], out.ragged("log_probs").values, atol=1e-12, rtol=0)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(folder, tmp_path_factory, request):
    """Save checkpoints of several ranks after two steps, and record the state after their third step."""
    path = tmp_path_factory.mktemp("ranks")
    run_ranks(JOB, "save", folder, path, path, ranks=request.param)
    return path


def gap(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def test_what_is_written_beside_training_is_the_state_when_it_began(saved):
    for precision, record in torch.load(saved / "saved.pt").items():
        assert gap(record["at_once"], record["saved"]) == 0, precision
        assert gap(record["beside"], record["saved"]) == 0, precision
        assert gap(record["next"], record["saved"]) > 1e-4


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_they_go_on_at_fewer(folder, saved, tmp_path, ranks):
    run_ranks(JOB, "resume", folder, saved, tmp_path, ranks=ranks)
    wanted = torch.load(saved / "saved.pt")
    found = torch.load(tmp_path / f"resumed_{ranks}.pt")
    for precision, tolerance in TOLERANCE.items():
        for way in ("at_once", "beside"):
            assert gap(found[precision][way], wanted[precision]["saved"]) == 0
            following = found[precision][f"{way}, next"]
            assert synthetic.relative_difference(following, wanted[precision]["next"]) <= tolerance
