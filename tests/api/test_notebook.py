import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from tandem.api.notebook import LiveCurve
from tandem.trainer.loop import Step
from tests.support.tiny import make_model

CELLS = [
    """
import tandem
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
def right(prompt, response, answer):
    return float(answer in response)
settings = {"data.train_batch_size": 5, "data.max_response_length": 4, "actor_rollout_ref.rollout.n": 4}
trainer = tandem.Trainer("MODEL", train=rows, rewards=right, steps=3, out="OUT", config=settings)
""",
    """
for step in trainer:
    break
step.number
""",
    """
for step in trainer:
    pass
trainer.close()
(trainer.run.steps, trainer.run.state)
""",
]


def test_the_curve_fills_the_picture(monkeypatch):
    drawn = []
    shown = SimpleNamespace(update=drawn.append)
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    display = SimpleNamespace(SVG=str, display=lambda first, display_id: drawn.append(first) or shown)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    curve = LiveCurve()
    for number, reward in ((11, 0.5), (12, 0.25), (15, 1.0)):
        curve(Step(number, {"reward/mean": reward}, interrupted=False))
    places = [re.findall('points="(.*?)"', each) for each in drawn]
    assert places[0] == ["40.0,135.0"] and places[2] == ["40.0,98.3 185.0,135.0 620.0,25.0"]


@pytest.mark.slow
def test_cells_train_and_draw_a_curve(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    model = make_model(tmp_path / "model")
    cells = [cell.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "run")) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[1][-1]["data"]["text/plain"] == "1"
    assert outputs[2][-1]["data"]["text/plain"] == "(3, 'finished')"
    data = [out["data"] for cell in outputs for out in cell if "data" in out]
    (drawn,) = (each["image/svg+xml"] for each in data if "image/svg+xml" in each)
    assert "reward/mean, step 3" in drawn
