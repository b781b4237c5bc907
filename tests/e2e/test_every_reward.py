"""A run with two reward models, two references, a reward function and a judge; see `make test-vllm`."""

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from tandem.observability.run import read_metrics
from tests.engines.rollout.vllm.models import build
from tests.engines.rollout.vllm.serving import serving
from tests.support.runs import Lab, without_times
from tests.support.scorers import make_other_tokenizer, make_scorer
from tests.support.tiny import make_model, make_tokenizer
from tests.support.words import words as full_words

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("vllm")

STEPS = 4
PARTS = ("share", "grade", "helpful", "helpful/normalized", "safe", "judge_tokens", "judge_cached")
DIGITS = "0123456789"


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = make_tokenizer(folder)
    build(vocab_size=len(tokenizer)).save_pretrained(folder)
    with serving(folder, "--max-model-len", "128", "--served-model-name", "judge") as url:
        yield url


def words(lab: Lab, judge: str) -> list[str]:
    (lab.folder / "mine.py").write_text("def share(prompt, response): return len(set(response)) / 6\n")
    server = {
        "url": f"{judge}/v1",
        "model": "judge",
        "cache": str(lab.folder / "answers"),
        "options": {"temperature": 0, "max_tokens": 1, "structured_outputs": {"choice": list(DIGITS)}},
    }
    grade = {"server": server, "rubric": "short", "template": "{rubric} {response}", "pattern": "([0-9])"}
    judged = {"path": "tandem.rewards.judges", "name": "judge", "label": "grade"}
    own = {"path": str(lab.folder / "mine.py"), "name": "share"}
    terms = [own, {**judged, "reward_kwargs": {**grade, "scale": [0, 9]}}]
    safe, helpful = (
        make_scorer(lab.folder / name, lab.model, seed=i) for i, name in ((1, "safe"), (2, "helpful"))
    )
    models = {
        "safe": {"path": str(safe), "weight": 0.5},
        "helpful": {"path": str(helpful), "tokenizer_path": str(lab.folder / "other"), "normalize": True},
    }
    make_other_tokenizer(lab.folder / "other")
    far = make_model(lab.folder / "far", seed=9)
    return [
        f"custom_reward_function.terms={json.dumps(terms)}",
        "reward_model.enable=true",
        f"reward_model.models={json.dumps(models)}",
        f"actor_rollout_ref.ref.models={{start: {{weight: 0.5}}, far: {{path: {far}, weight: 0.1}}}}",
        *full_words(f"A.use_kl_loss=true trainer.save_freq=2 trainer.device=cpu steps={STEPS}"),
    ]


def command(lab: Lab, name: str, given: list[str]) -> list[str]:
    return [sys.executable, "-m", "tandem", "train", *lab.overrides(lab.folder / name), *given]


def test_all_of_them_in_one_run_which_is_killed_and_goes_on(tmp_path, judge):
    lab = Lab(tmp_path)
    given = words(lab, judge)
    subprocess.run(command(lab, "whole", given), check=True, timeout=300)
    whole = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    for row in whole:
        assert {f"reward/extra/{part}" for part in PARTS} <= row.keys()
        assert {"actor/kl/start", "actor/kl/far", "reward/running_std/helpful"} <= row.keys()
        kl = 0.5 * row["actor/kl/start"] + 0.1 * row["actor/kl/far"]
        assert row["actor/kl"] == pytest.approx(kl, rel=1e-5)
        parts = [row[f"reward/extra/{part}"] for part in ("share", "grade", "helpful/normalized", "safe")]
        assert row["reward/mean"] == pytest.approx(sum(parts) - 0.5 * parts[-1], abs=1e-4)
    assert any(0 < row["reward/extra/grade"] < 1 for row in whole)
    assert whole[0]["reward/extra/judge_cached"] < 1

    killed = subprocess.Popen(command(lab, "killed", given))
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed" / "checkpoints" / "step_000002").is_dir():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    subprocess.run(command(lab, "killed", given), check=True, timeout=300)
    resumed = read_metrics(tmp_path / "killed" / "metrics.jsonl")
    assert [row["reward/extra/judge_cached"] for row in resumed] == [1.0] * STEPS  # the same questions
    assert what_was_learnt(resumed) == what_was_learnt(whole)


def what_was_learnt(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timeless = without_times(rows)
    return [{name: value for name, value in row.items() if "/judge_" not in name} for row in timeless]
