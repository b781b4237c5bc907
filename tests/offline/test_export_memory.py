"""Export from a checkpoint to a model folder, tensor by tensor."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

import tandem
from tandem.checkpoint import CheckpointManager
from tandem.checkpoint.hf_export import export
from tandem.cli.main import main
from tandem.errors import CheckpointError
from tandem.offline.export import export_checkpoint
from tests.support.tiny import make_tokenizer

CHILD = """
import sys, torch
from pathlib import Path
from tandem.offline.export import export_checkpoint

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1])

run, out, max_shard_bytes = sys.argv[1:]
torch.empty(1)
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
export_checkpoint(Path(run), Path(out), max_shard_bytes=int(max_shard_bytes))
print(1024 * (kilobytes("VmHWM") - before))
"""
SHAPE = {
    **{"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 18},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True},
}
SHARD = 20_000_000


def values(name, shape):
    """Return content that depends only on the name."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Create a run whose policy has 290 MB, with a checkpoint as an engine writes it."""
    folder = tmp_path_factory.mktemp("run")
    make_tokenizer(folder / "model")
    Qwen2Config(**SHAPE).save_pretrained(folder / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))
    weights = {name: values(name, parameter.shape) for name, parameter in model.named_parameters()}
    state = {"model": weights, "version": torch.tensor(3)}
    (folder / "config.yaml").write_text(
        f"model: {{path: {folder / 'model'}, tokenizer_path: {folder / 'model'}}}\n"
        "trainer: {keep_best: null}\n"
    )
    manager = CheckpointManager(folder / "checkpoints")
    manager.save(3, {"actor": lambda path: save_shards(state, checkpoint_id=path, no_dist=True)}, {})
    return folder


@pytest.mark.slow
def test_the_peak_is_a_shard_and_a_tensor(run, tmp_path):
    out = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run), str(out), str(SHARD)],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    grown = int(done.stdout.splitlines()[-1])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    whole, largest = index["metadata"]["total_size"], 2048 * 512 * 4
    assert whole > 250e6
    assert grown < SHARD + 3 * largest + 60e6, grown  # includes what libraries allocate at their first use
    files = sorted(out.glob("*.safetensors"))
    assert len(files) >= whole // SHARD and all(file.stat().st_size < SHARD + 10_000 for file in files)
    names = 0
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file.name
                assert torch.equal(stored.get_tensor(name), values(name, stored.get_tensor(name).shape))
                names += 1
    assert names == len(index["weight_map"]) == 2 + 12 * SHAPE["num_hidden_layers"]
    assert AutoModelForCausalLM.from_pretrained(out).lm_head.weight.shape == (2000, 512)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_merged_experts_are_stored_one_by_one(tmp_path, max_shard_bytes):
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "wanted")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    target = (tokenizer.save_pretrained, tmp_path / "out", torch.float32)
    export(model.named_parameters(), config, *target, max_shard_bytes=max_shard_bytes)
    with safe_open(tmp_path / "wanted" / "model.safetensors", framework="pt") as wanted:
        found = {}
        for file in (tmp_path / "out").glob("*.safetensors"):
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        assert sorted(found) == sorted(wanted.keys())
        assert any(".experts.3.up_proj" in name for name in found)
        assert all(torch.equal(value, wanted.get_tensor(name)) for name, value in found.items())
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same = dict(loaded.named_parameters())
    assert all(torch.equal(same[name], value) for name, value in model.named_parameters())


def same_files(*folders):
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    return first == second


KEPT = ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=1", "trainer.total_training_steps=4")


@pytest.mark.slow
def test_the_best_of_a_run_is_kept_and_exported(lab, capsys):
    """The best step is chosen by the entropy, which every step has and which changes."""
    first = lab.run("all", *KEPT[::2])
    entropies = {row["step"]: row["actor/entropy"] for row in first.rows}
    for mode, choose in (("max", max), ("min", min)):
        run = lab.run(mode, *KEPT, "trainer.keep_best=actor/entropy", f"trainer.keep_best_mode={mode}")
        best = choose(entropies, key=lambda step: entropies[step])
        kept = sorted(int(path.name[5:]) for path in (run.folder / "checkpoints").iterdir())
        assert kept == sorted({best, 4})
        out = lab.folder / f"{mode}_best"
        assert main(["export", str(run.folder), str(out), "--best"]) == 0
        assert str(out) in capsys.readouterr().out
        tandem.open(run.folder).export(python := lab.folder / f"{mode}_python", best=True)
        assert same_files(out, python)
        wanted = lab.folder / f"{mode}_wanted"
        export_checkpoint(first.folder / "checkpoints" / f"step_{best:06d}", wanted)
        found, same = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (out, wanted))
        assert all(torch.equal(found[name], value) for name, value in same.items())
    newest = AutoModelForCausalLM.from_pretrained(export_checkpoint(first.folder, lab.folder / "newest"))
    assert all(torch.equal(value, first.weights()[name]) for name, value in newest.named_parameters())


def test_a_metric_that_no_step_has_is_told_once_and_no_best_is_exported(lab):
    run = lab.run("unjudged", *KEPT, "trainer.keep_best=actor/entropie")
    told = [sentence for sentence in run.said if "trainer.keep_best" in sentence]
    assert len(told) == 1 and "step 1 has no finite actor/entropie" in told[0]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_000004"]
    with pytest.raises(CheckpointError, match="has no best checkpoint") as caught:
        export_checkpoint(run.folder, lab.folder / "none", best=True)
    assert "actor/entropie" in caught.value.got
    with pytest.raises(CheckpointError, match="--best needs a run"):
        export_checkpoint(run.folder / "checkpoints" / "step_000004", lab.folder / "none", best=True)
    assert not (lab.folder / "none").exists()
