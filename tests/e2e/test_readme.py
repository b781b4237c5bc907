import re
import runpy

import pytest

from tandem.observability.run import read_metrics
from tests.e2e.shop import SOURCES
from tests.support.tiny import make_model
from tests.support.warm import cold

pytestmark = pytest.mark.slow


def python(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (SOURCES / page).read_text(), re.DOTALL)


def test_the_program_of_ones_own_on_ray(tmp_path, ray_cluster, capfd):
    (program,) = [block for block in python("docs/extend/worker.md") if "RayBackend" in block]
    file = tmp_path / "program.py"
    file.write_text(program)
    runpy.run_path(str(file), run_name="__main__")
    shown = re.search(r"print\(.*\)  # (.*)", program)
    assert shown[1] in capfd.readouterr().out.splitlines()


def test_the_first_screen(tmp_path, monkeypatch):
    first, step_by_step = python("docs/from-python.md")
    (readme,) = python("README.md")
    assert set(readme.splitlines()) <= set(first.splitlines())
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    program = (first + step_by_step).replace("path/to/model", str(model))
    assert program.count("steps=100, ") == 1
    file = tmp_path / "first.py"
    file.write_text(program.replace("steps=100, ", "steps=3, ").replace("val=rows", "steps=1, val=rows"))
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(file))
    assert names["run"].steps == 3
    assert (tmp_path / "my-model" / "config.json").is_file()
    assert [row["step"] for row in names["trainer"].run.metrics] == [0, 1]


@pytest.mark.timeout(900)
def test_a_policy_learns_what_the_preferences_of_an_example_were_about(tmp_path):
    (tmp_path / "examples").symlink_to(SOURCES / "examples")
    folder = "examples/reward_model"
    for words in (
        [f"{folder}/make_preferences.py"],
        ["-m", "tandem", "rm", f"{folder}/rm.yaml", "trainer.total_training_steps=30"],
        ["-m", "tandem", "export", "runs/preferences", "my_reward_model"],
        ["-m", "tandem", "sft", f"{folder}/sft.yaml", "trainer.total_training_steps=40"],
        ["-m", "tandem", "export", "runs/ratings", "my_policy"],
        ["-m", "tandem", "train", f"{folder}/ppo.yaml", "trainer.total_training_steps=15"],
    ):
        done = cold(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, *_, last = read_metrics(tmp_path / "runs" / "preferred" / "metrics.jsonl")
    for name in ("reward/extra/preferred", "reward/extra/stars"):
        assert last[name] > first[name] + 2, name
