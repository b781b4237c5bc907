import json
from collections import Counter

import pytest

from tandem.observability.run import read_samples
from tests.bench.test_bench import bench
from tests.support.words import words as full_words

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "places", ["trainer.n_gpus_per_node=2", "Q={train: [1], write: [1]} P={actor: train, rollout: write}"]
)
def test_lengths_and_phases_are_those_of_one_process(places, tmp_path, ray_cluster):
    assert bench(tmp_path, *full_words(places), "--steps", "1", "--no-save") == 0
    table = read_samples(tmp_path / "all" / "run" / "samples" / "step_000002.parquet")
    assert Counter(sum(mask) for mask in table["response_mask"]) == Counter([5, 8, 10, 13, 15, 18, 20, 20])
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["machine"]["devices"] == 2 and found["machine"]["device"].endswith("float32")
    phases = {"gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "step"}
    assert phases <= set(found["rows"]) and "save_checkpoint" not in found["rows"]
