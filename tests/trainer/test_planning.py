import re
from unittest.mock import Mock

import pytest
import torch

from tandem.config.load import load_train_config
from tandem.engines.train import recomputation
from tandem.engines.train.execution import Execution
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import DeviceMemoryError
from tandem.memory.host import host_free
from tandem.memory.plan import GIB
from tandem.trainer import planning
from tandem.trainer.planning import tell_plan
from tandem.trainer.run import run_ppo
from tandem.workers import base
from tests.support.words import words as full_words

SEVEN = (
    "M.path=Qwen/Qwen2.5-7B algorithm.adv_estimator=grpo A.use_dynamic_bsz=true data.train_batch_size=64",
    "A.ppo_max_token_len_per_gpu=16384 R.n=8",
)


def told(*words, gpus=None):
    said: list[str] = []
    config = load_train_config(None, full_words(*words), elsewhere=True).config
    made = tell_plan(config, said.append, gpus)
    (sentence,) = said
    return made, sentence


@pytest.mark.parametrize("gpus", [None, False])
def test_a_run_on_ray_knows_what_its_cluster_has(gpus, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    made, said = told(*SEVEN, "trainer.backend=ray", gpus=gpus)
    assert (made is None) == (gpus is None) == ("other machines" in said)


def test_a_run_says_its_worst_moment(lab):
    (sentence,) = [line for line in lab.run("told", "trainer.device=cpu").said if "memory" in line]
    found = re.fullmatch(
        r".*memory.+ [\d.]+ MiB of ([\d.,]+) GiB free on this host: [\d.,]+ GiB .+", sentence
    )
    assert found and float(found[1].replace(",", "")) == pytest.approx(host_free() / GIB, rel=0.5)


def test_predicted_bytes_stand_beside_the_phases_that_ran(lab):
    for word, timed in (("A.use_kl_loss=true", {"ref", "update_actor"}), ("", {"update_actor"})):
        for row in lab.run(f"predicted_{len(timed)}", word, "trainer.device=cpu").rows:
            found = {name.rpartition("/")[2]: row[name] for name in row if "memory_predicted" in name}
            assert timed <= set(found) == {phase for phase in found if f"timing/{phase}" in row}
            assert ("ref" in found) == ("ref" in timed)
            # at least the weights, gradients and two moments of 21,728 numbers in fp32
            assert 16 * 21_728 < found["update_actor"] < 2e7
            assert not [name for name in row if "memory_peak" in name]


@pytest.mark.parametrize(("where", "phase"), [("train_step", "actor update"), ("forward", "old log-probs")])
def test_memory_that_does_not_suffice_is_held_against_the_plan(lab, monkeypatch, where, phase):
    """A device of 100 MB, which is made up, runs out of memory: the pass holds 60 MB."""
    use = {"total": 10**8, "used": 90_000_000, "reserved": 80_000_000, "allocated": 60_500_000}
    for module in (recomputation, base):
        monkeypatch.setattr(module, "memory_use", lambda device: use)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")
    real, fail = FSDPEngine.forward, Mock(side_effect=error)

    def forward(self, batch, **options):
        return fail() if "response_mask" in batch.batch else real(self, batch, **options)

    if where == "train_step":
        monkeypatch.setattr(Execution, "gradients", fail)
    else:
        monkeypatch.setattr(FSDPEngine, "forward", forward)
    with pytest.raises(DeviceMemoryError) as caught:
        run_ppo(lab.config("A.ppo_mini_batch_size=2", run=where), say=print)
    weights = 3 * 4 * 21_728  # includes two moments
    held = [weights, 0, 60_500_000 - weights, 19_500_000, 10_000_000]
    names = ["weights and optimizer", "other models", "the pass", "gaps", "outside PyTorch"]
    assert caught.value.held == pytest.approx(dict(zip(names, held, strict=True)), rel=0.01)
    said = str(caught.value)
    assert f"in the {phase}, by plan: weights and optimizer" in said and "Tried to allocate 2.00 GiB" in said
    assert re.search(r"the pass exceeded it most, by 5\d\.\d MiB", said), said
    assert re.search("remedy: +(change first|set|use fewer) ", said), said


@pytest.mark.skipif(not torch.cuda.is_available(), reason="peaks are counted on a CUDA device")
def test_a_gpu_measures_the_peak_of_each_phase(lab):
    for row in lab.run("measured", "trainer.device=cuda").rows:
        assert row["perf/memory_peak_bytes/update_actor"] > 16 * 21_728
        assert row["perf/memory_predicted_bytes/update_actor"] > 0


def test_processes_share_a_host():
    _, sentence = told(*SEVEN, "trainer.device=cpu trainer.n_gpus_per_node=4 trainer.backend=ray")
    assert "free on this host for each of 4 processes" in sentence


def test_a_run_that_does_not_fit_is_told_what_to_change_first(monkeypatch):
    monkeypatch.setattr(planning, "on_cpu", lambda trainer: False)
    monkeypatch.setattr(planning, "_device_here", lambda: (24.0 * GIB, " on each GPU"))
    _, sentence = told(*SEVEN, "trainer.n_gpus_per_node=8")
    assert sentence.startswith("Warning: ") and "worst moment: reshard, " in sentence
    assert "of 24.0 GiB on each GPU:" in sentence and "; change first actor_rollout_ref." in sentence
    monkeypatch.setattr(planning, "_device_here", lambda: (141.0 * GIB, " on each GPU"))
    _, sentence = told(*SEVEN, "trainer.n_gpus_per_node=8")
    assert re.search(r"of 141\.0 GiB on each GPU: [\d.]+ GiB [^;]+$", sentence)


def test_a_run_without_a_plan_is_told_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 8, "vocab_size": 9}')
    made, sentence = told(*SEVEN, f"M.path={tmp_path} trainer.device=cpu")
    assert made is None and "a size is missing in the model's config.json" in sentence
