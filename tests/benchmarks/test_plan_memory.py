import importlib
import json
from pathlib import Path

import pytest

from tests.support.warm import cold

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # like a script, it finds `traced_memory` in the same folder
    return importlib.import_module("plan_memory")


def test_the_kept_traces(bench):
    rows = json.loads((BENCHMARKS / "results" / "plan_memory.json").read_text())["rows"]
    assert list(rows) == [name for name, _ in bench.CASES]
    for name, row in rows.items():
        found = bench.errors(row, bench.predicted(bench.Case(**row["case"])))
        assert found == row["errors"], name
        assert all(abs(kinds["total"]) <= bench.WORST for kinds in found.values()), (name, found)


PROGRAM = """
import json, plan_memory as bench
shape = {**bench.published("Qwen2.5-0.5B"), "num_hidden_layers": 2}
case = bench.Case(shape, (512, 300, 212), micro=2, shards=4, mode="full")
print(json.dumps(bench.errors({"case": {}, "traced": bench.traced(case)}, bench.predicted(case))))
"""


@pytest.mark.slow
def test_a_trace_made_here():
    done = cold("-c", PROGRAM, cwd=BENCHMARKS, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(abs(kinds["total"]) <= 0.03 for kinds in found.values()), found
