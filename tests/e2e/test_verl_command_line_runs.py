import pytest

from tandem.observability.run import read_metrics
from tests.e2e import test_verl_keys_learning, test_verl_keys_running
from tests.e2e.keys import TRIED
from tests.e2e.shop import DOCUMENT, train
from tests.support.warm import cold

DRY_RUN = """
import sys
from tandem.cli.main import main
status = main(["train", *sys.argv[1:]])
assert not {"torch", "transformers", "docs.readers", "tandem.config.explain"} & set(sys.modules)
sys.exit(status)
"""

pytestmark = pytest.mark.e2e


FILL_TRIED = (test_verl_keys_learning, test_verl_keys_running)


def test_every_key_of_the_command_line_has_been_tried():
    assert set(DOCUMENT) == TRIED


@pytest.mark.parametrize("engine", ["native", pytest.param("hf", marks=pytest.mark.slow)])
def test_two_steps_and_a_resume(shop, engine):
    folder = shop.folder / engine
    words = shop.document(f"actor_rollout_ref.rollout.name={engine}", f"trainer.default_local_dir={folder}")
    first = train([*words, "trainer.total_training_steps=2"], shop.folder)
    assert first.returncode == 0, first.stderr
    assert "step 2/2" in first.stdout
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002"]
    assert list((folder / "tensorboard").iterdir())

    resumed = train([*words, "trainer.total_training_steps=3"], shop.folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout and "after step 2" in resumed.stdout
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("actor/kl" in row for row in rows)
    assert not (folder / "earlier").exists()


def test_a_dry_run_shows_the_config_without_torch(shop):
    done = cold("-c", DRY_RUN, *shop.document(), "--dry-run", cwd=shop.folder, env={})
    assert done.returncode == 0, done.stderr
    for text in (
        "default_local_dir: runs/verl_grpo_boba/ds_7b_fsdp_sglang",
        *("samples per step: 12", "# steps: 90000", "actor optimizer steps per step: 2"),
        "micro-batches, actor update: at most 40 tokens per device",
    ):
        assert text in done.stdout
    assert done.stderr.count("note: ") == 3
    assert not (shop.folder / "runs").exists()
