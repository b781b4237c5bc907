from pathlib import Path

import pytest

from tandem.errors import TandemError
from tandem.observability.reading import Run
from tests.support import sick
from tests.support.marks import slow_but
from tests.support.museum import FAULTS

SOON = 2
"""The number of steps within which a fault must be reported, from the first step in which it can show."""
REWARD = f"custom_reward_function.path={sick.__file__} custom_reward_function.name=digits"


def found(lab, name, fault):
    """Return the name of the warning or the text of the error about the fault, and its step."""
    steps = 16 if fault.named == "reward_constant" else fault.effect + SOON - 1
    folder = name.replace(" ", "_")
    reward = ("custom_reward_function.name=nothing",) if fault.named == "reward_constant" else ()
    words = [REWARD, *reward, *fault.words]
    with pytest.MonkeyPatch.context() as patch:
        fault.put_in(patch)
        try:
            if fault.named == "lost_prompts":
                lab.run(folder, *words, "trainer.save_freq=2")
            run = lab.run(folder, *words, f"steps={steps}")
        except TandemError as error:
            path = lab.folder / folder / "metrics.jsonl"
            return str(error), 1 + (len(path.read_text().splitlines()) if path.exists() else 0)
    warnings = [event for event in Run(run.folder).events if event["event"] == "warning"]
    told = [event for event in warnings if event["name"] == fault.named]
    assert told, (name, [event["name"] for event in warnings])
    return told[0]["name"], told[0]["step"]


QUICK = ("weights damaged", "loss scale")
"""The faults in the default set of tests; the long set tries the others."""


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_the_fault_is_named(lab, name):
    fault = FAULTS[name]
    said, step = found(lab, name, fault)
    assert fault.named in said
    assert fault.named == "reward_constant" or fault.effect <= step <= fault.effect + SOON - 1, step


@pytest.mark.slow
def test_a_fault_that_lasts_is_told_once_however_often_the_run_goes_on(lab):
    fault, said = FAULTS["loss scale"], []
    with pytest.MonkeyPatch.context() as patch:
        fault.put_in(patch)
        for steps in (2, 4):
            words = (REWARD, *fault.words, f"steps={steps} trainer.save_freq=1")
            run = lab.run("goes_on", *words)
            said.append([sentence for sentence in run.said if "the loss is" in sentence])
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert [len(sentences) for sentences in said] == [1, 0]
    events = [event for event in Run(run.folder).events if event["event"] == "warning"]
    assert [event["name"] for event in events].count(fault.named) == 1


@pytest.mark.slow
def test_healthy_runs_are_told_nothing(lab):
    words = {word for fault in FAULTS.values() for word in fault.words if "lora" not in word}
    for number, extra in enumerate(sorted(words)):
        run = lab.run(f"healthy{number}", REWARD, extra, "steps=4")
        assert not [event for event in Run(run.folder).events if event["event"] == "warning"], extra


def test_the_page_lists_them_all():
    page = (Path(__file__).parents[2] / "docs" / "museum.md").read_text()
    for fault in FAULTS.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| {fault.what} |"))
        assert f"| {fault.met} | {fault.effect} |" in row and fault.named in row
        assert ("symptom" in row) == fault.symptom
