import json
from collections import Counter

import pytest

from tandem.cli.main import main
from tandem.observability.run import read_samples
from tests.bench.test_bench import SIZES, STORED

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "places",
    [
        ("trainer.n_gpus_per_node=2",),
        (
            "trainer.resource_pools={train: [1], write: [1]}",
            "trainer.placement={actor: train, rollout: write}",
        ),
    ],
    ids=["together", "apart"],
)
def test_lengths_and_phases_are_those_of_one_process(places, tmp_path, ray_cluster):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(STORED))
    words = ("--dummy", f"actor_rollout_ref.model.path={model}", *SIZES, *places, "--steps", "1", "--no-save")
    lengths = ("--lengths", "uniform:4:24", "--prompt-lengths", "uniform:2:10")
    files = (
        "--folder",
        tmp_path / "all",
        "--out",
        tmp_path / "out.json",
        "--device-file",
        tmp_path / "device.json",
    )
    assert main(["bench", *map(str, (*words, *lengths, *files))]) == 0
    table = read_samples(tmp_path / "all" / "run" / "samples" / "step_000002.parquet")
    assert Counter(sum(mask) for mask in table["response_mask"]) == Counter([5, 8, 10, 13, 15, 18, 20, 20])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["devices"] == 2 and found["machine"]["device"].endswith("float32")
    assert {"gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "step"} <= set(
        found["rows"]
    )
    assert "save_checkpoint" not in found["rows"]
