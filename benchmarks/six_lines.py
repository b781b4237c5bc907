"""Measure the README's six lines, from the start of Python to the first step and to reward 0.9.

    python benchmarks/six_lines.py

The model is untrained and has a million parameters. The reward of a response is the share of its characters
that equal the letter in the prompt. The program prints one line of JSON: `import_s` (the import of tandem),
`first_step_s` and `reward_s` (the first step with a mean reward of 0.9), both counted from the start of
Python, and `step`, the number of that step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiny import arguments

from tandem.demo.model import write_model

PROGRAM = """
import json, time
started = time.time()
import tandem
imported = time.time()
rows = [{"prompt": f"{letter}:", "letter": letter} for letter in "abcdefghijklmnopqrstuvwxyz" * 40]
def repeats(prompt, response, letter): return response.count(letter) / 8
config = {"data.max_response_length": 8, "actor_rollout_ref.actor.optim.lr": 1e-3}
times = [imported - started]
def seen(step, metrics): times.append((time.time(), metrics["reward/mean"]))
run = tandem.train("model", train=rows, rewards=repeats, out="run", config=config, on_step=seen, steps=60)
"""
REWARD = 0.9


def main() -> None:
    options = arguments(argparse.ArgumentParser(description=__doc__))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), seed=0)
        began = time.time()
        program = PROGRAM.replace("steps=60", "steps=2") if options.tiny else PROGRAM
        words = [sys.executable, "-c", f"{program}print(json.dumps(times))"]
        ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900, check=True)
    imported, *steps = json.loads(ran.stdout.splitlines()[-1])
    reached = next((number for number, (_, reward) in enumerate(steps) if reward >= REWARD), None)
    facts = {"import_s": imported, "first_step_s": steps[0][0] - began}
    if reached is not None:
        facts |= {"reward_s": steps[reached][0] - began, "step": reached + 1}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
