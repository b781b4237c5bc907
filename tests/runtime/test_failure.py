from pathlib import Path

import pytest

from tandem.errors import DataError, WorkerFailure
from tandem.runtime.failure import Fault, Place, Record, Status, first_failure, log_header, tail


def place(rank, log=Path("nowhere")):
    return Place("policy", rank, 2, "10.0.0.1", 100 + rank, log)


def record(rank, at, *, inputs=False):
    return Record("policy", rank, "actor", "update", "ValueError: x", "trace", None, inputs, at)


def test_it_began_with_the_earliest_that_was_not_waiting_for_another():
    waited, late, early = record(0, 1.0, inputs=True), record(1, 3.0), record(2, 2.0)
    assert first_failure([waited, late, early]) is early
    assert first_failure([waited]) is waited and first_failure([]) is None


def test_the_end_of_a_log_is_that_of_this_process(tmp_path):
    log = tmp_path / "policy_0.log"
    own = [f"line {i}" for i in range(50)]
    log.write_text("\n".join([log_header(7), "of an earlier start", log_header(8), *own, "trace", "back\n"]))
    assert tail(log, 8, without="trace\nback\n", lines=3) == "line 47\nline 48\nline 49"
    assert tail(log, 8, without="another", lines=2) == "trace\nback"
    assert tail(log, 8, lines=1000).splitlines() == [*own, "trace", "back"]
    assert tail(tmp_path / "none.log", 8) == ""
    log.write_text(f"{log_header(7)}\nof an earlier start\n{log_header(8)}\n")
    assert tail(log, 8) == ""


def test_of_a_crash_the_tail_is_the_thread_that_crashed(tmp_path):
    log, fatal = tmp_path / "worker.log", "Fatal Python error: Segmentation fault"
    frame = 'hread 0x{n} (most recent call first):\n  File "other.py", line {n}\n\n'
    threads = "".join("T" + frame.format(n=n) for n in range(99))
    crashed = 'Current thread 0x7 (most recent call first):\n  File "faulty.py", line 3 in fail'
    modules = "Extension modules: " + ", ".join(f"package.module_{n}" for n in range(999))
    log.write_text(f"{log_header(8)}\nbegins\n{fatal}\n\n{threads}{crashed}\n\n{modules}")
    assert tail(log, 8) == f"{fatal}\n{crashed}"


def test_the_report_says_who_where_what_and_what_the_others_did(tmp_path):
    log = tmp_path / "policy_1.log"
    log.write_text(f"{log_header(101)}\nloading\n")
    fault = Fault(place(1, log), "its process died (killed)", "actor", "update_actor")
    others = {place(0): str(Status("running", "actor", "update_actor", 3.21, 2**30)), place(2): "idle"}
    busy = "running actor.update_actor for 3.2 s"
    failure = fault.report(others)
    assert isinstance(failure, WorkerFailure)
    report = str(failure).splitlines()
    assert report[0] == "actor rank 1 of 2 failed in update_actor: its process died (killed)"
    for fact, line in zip(("policy, node 10.0.0.1, pid 101", str(log), "loading"), report[1:4], strict=True):
        assert fact in line
    for line, rank, what in zip(report[-2:], (0, 2), (busy, "idle"), strict=True):
        assert line.strip() == f"policy rank {rank} of 2 (node 10.0.0.1, pid {100 + rank}): {what}"
    many = str(Fault(place(0), "gone").report({place(rank): "idle" for rank in range(1, 101)}))
    assert many.count(": idle") == 16 and "84 more" in many


@pytest.mark.parametrize("cause", [None, ValueError("x"), DataError("x")])
def test_an_error_the_user_must_act_on_is_not_worth_a_restart(cause):
    failure = Fault(place(0), "it raised", cause=cause).report({})
    assert failure.restartable is not isinstance(cause, DataError)
    assert failure.__cause__ is cause
