from typing import Any

from tandem.cli.main import main
from tandem.config.root import TrainConfig
from tandem.demo import program
from tandem.observability.run import RunFolder


def test_ranks_and_further_words_reach_the_training(tmp_path, monkeypatch):
    given: list[TrainConfig] = []

    def run(config: TrainConfig, *, say: Any) -> bool:
        given.append(config)
        for step, accuracy in ((0, 0.3), (5, 0.9)):
            RunFolder(config.trainer.default_local_dir).log_metrics(step, {"val/accuracy": accuracy})
        return False

    monkeypatch.setattr(program, "run_ppo", run)
    monkeypatch.setattr(program, "warm_up", lambda folder, seed, say, task: folder / "model")
    monkeypatch.setattr(program, "_report", lambda outcome, curve, task, seed, say: None)
    assert main(["demo", "--out", str(tmp_path), "--ranks", "2", "trainer.max_restarts=3"]) == 0
    assert given[0].trainer.pools == {"global_pool": (2,)}
    assert given[0].trainer.resolved_backend == "ray"
    assert given[0].trainer.max_restarts == 3
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert given[1].trainer.resolved_backend == "local"
