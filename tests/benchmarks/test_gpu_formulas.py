import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu
from benchmarks.device import environment, generation, shapes, training
from benchmarks.device.rates import H100, Rates
from benchmarks.device.report import Row, Setting
from benchmarks.device.table import markdown, predict, predictions
from tandem.engines.rollout.native.paged import bytes_per_token
from tandem.engines.rollout.native.runner import make_runner

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_parameters_and_cache_are_those_of_the_model():
    model = shapes.build("tiny", torch.bfloat16, CPU)
    assert shapes.parameters("tiny") == sum(p.numel() for p in model.parameters())
    runner = make_runner("auto", model, 64)
    assert shapes.kv_bytes("tiny") == bytes_per_token(runner.layers, torch.bfloat16)
    assert shapes.parameters("1.5B") == 1_543_714_304
    assert shapes.parameters("7B") == 7_615_616_512


def test_operations_of_a_forward_are_those_that_are_run():
    """PyTorch's counter counts the whole square of scores, but a causal pass needs half of it."""
    model, length = shapes.build("tiny", torch.float32, CPU), 48
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 512, (1, length)), use_cache=False)
    attended = 2 * length * 64 * 2
    # older versions of transformers compute the rotary angles as a product, 16 operations per token
    expected = shapes.forward_operations("tiny", length) + attended
    assert counter.get_total_flops() / length == pytest.approx(expected, rel=1e-4)


def test_the_least_time_of_a_step_is_that_of_reading_or_of_computing():
    read = 2 * shapes.matrices("1.5B") + 256 * 1024 * 28 * 1024
    assert shapes.decode_seconds("1.5B", 256, 1024, 3e12, 1e18) == pytest.approx(read / 3e12)
    computed = 256 * (2 * shapes.matrices("1.5B") + 4 * 1024 * 1536 * 28)
    assert shapes.decode_seconds("1.5B", 256, 1024, 1e18, 8e14) == pytest.approx(computed / 8e14)


def test_the_bound_of_a_load_adds_up_what_each_token_reads():
    load = generation.Load("tiny", 16, 16, 24, 8)
    requests, kv = load.make(), shapes.kv_bytes("tiny")
    read = sum((len(r.prompt_ids) + t + 0.5) * kv for r in requests for t in range(r.params.max_tokens))
    written = [request.params.max_tokens for request in requests]
    read += max(*written, sum(written) / 8) * 2 * shapes.matrices("tiny")
    expected = sum(written) / (read / H100.copy)
    assert load.tokens_per_s(H100) == pytest.approx(expected)
    assert len({request.id for request in requests}) == 16 and min(written) >= 1 and max(written) <= 24
    assert all((r.prompt_ids == s.prompt_ids).all() for r in requests for s in requests if r.uid == s.uid)


def test_state_is_twelve_bytes_a_parameter_and_an_update_adds_six():
    told = shapes.training_bytes("1.5B", 16384, fused=False)
    assert told["state"] == 12 * shapes.parameters("1.5B") < told["full"] - 6 * shapes.parameters("1.5B")
    assert told["full"] < told["ops"] < told["none"]
    assert shapes.training_bytes("1.5B", 16384, fused=True)["none"] < told["none"]
    formula = training.formula("1.5B", 16384, 14255, fused=True)
    expected = shapes.training_bytes("1.5B", 14255, fused=True)["none"]
    assert formula["none"] * 2**30 == pytest.approx(expected, abs=2**24)


def rows_of(phase: str) -> dict[str, Row]:
    setting = Setting(torch.device("cuda"), False, H100, Path(), 0.0)
    return {row.name: row for row in gpu.module(phase).rows(setting)}


@pytest.mark.parametrize("phase", gpu.PHASES)
def test_predictions_are_of_rows_that_there_are(phase):
    rows = rows_of(phase)
    for name, told in predictions()[phase].items():
        assert name in rows and told["because"]
        assert ("share" in told) == (rows[name].bound is not None and "says" not in told), name
        assert 0 < told.get("share", 0.5) < 1
    unsaid = rows.keys() - predictions()[phase].keys()
    assert all("Liger" in name or name.startswith("first generation") for name in unsaid), unsaid


def test_a_prediction_follows_the_rates_that_were_measured():
    twice = Rates(copy=2 * H100.copy, product=2 * H100.product, to_host=1e11, from_host=1e11)
    row = rows_of("decode")["1.5B, batch 256, context 1024"]
    told = {"share": 0.5}
    assert predict(row, told, twice)["value"] == pytest.approx(2 * predict(row, told, H100)["value"])
    moved = rows_of("training")["optimizer state to the host and back"]
    both = 2 * 8 * shapes.parameters("1.5B") / 50e9
    assert predict(moved, {"share": 0.5}, H100)["value"] == pytest.approx(2 * both)


def test_a_table_shows_errors_skipped_rows_and_predictions():
    report = gpu.Report(Path("decode.json"))
    known, unknown = {"share": 0.6, "value": 1481.0}, {"share": None, "value": None, "says": "out of memory"}
    report.rows = [
        {"name": "a", "unit": "tokens/s", "value": 1234.0, "share": 0.5, "predicted": known},
        {"name": "b", "unit": "s", "error": "Traceback …", "message": "OutOfMemoryError: 2|GiB"},
        {"name": "c", "skipped": "no time", "predicted": unknown},
    ]
    lines = markdown([("decode", report)]).splitlines()
    assert "| a | 1,234 tokens/s | 50% | 60% | 1,481 tokens/s |  |" in lines
    assert "| b | error |  |  |  | OutOfMemoryError: 2/GiB |" in lines
    assert "| c | skipped: no time |  |  | out of memory |  |" in lines


def test_pins_of_the_wheels_are_those_of_the_constraints():
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    lines = (ROOT / "benchmarks" / "device" / "wheels.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} <= pinned
    named = re.search(r"as (\d+) wheels", (ROOT / "CONTRIBUTING.md").read_text())
    assert named is not None and int(named[1]) == len(lines) - 1


def test_results_of_tests_are_read_with_the_text_of_what_failed(tmp_path):
    text = """<testsuites><testsuite>
        <testcase classname="tests.a" name="passes"/>
        <testcase name="fails"><failure message="assert 1 == 2">line 3</failure></testcase>
        <testcase classname="tests.a" name="waits"><skipped message="no GPU">here</skipped></testcase>
    </testsuite></testsuites>"""
    (tmp_path / "results.xml").write_text(text)
    cases = environment.cases_of(tmp_path / "results.xml")
    assert [case["outcome"] for case in cases] == ["passed", "failed", "skipped"]
    assert "assert 1 == 2\nline 3" in cases[1]["text"]
    assert environment.cases_of(tmp_path / "none.xml") == []
    said = "tests/a.py::passes[1-2] PASSED   [ 50%]\ntests/a.py::fails FAILED [ 99%]\ntests/a.py::runs "
    told = [(case["name"], case["outcome"]) for case in environment.cases_told(said)]
    assert told == [("tests/a.py::passes[1-2]", "passed"), ("tests/a.py::fails", "failed")]
    assert "tests/engines/rollout/test_rollout_gpu.py" in environment.test_files()
