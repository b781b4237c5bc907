import json
import math
import random

import pytest

from tandem import sandbox
from tandem.config.rewards import RewardConfig, SandboxConfig
from tandem.rewards import Item, check_sources, load_custom, reward_for
from tandem.rewards.pool import Pool
from tandem.rewards.programs import compute_score, program_in, same_text, same_value, tests_of
from tandem.sandbox import Run
from tests.support.marks import slow_but
from tests.support.refusing import refused

tests_of.__test__ = False
DOUBLE = "```python\nprint(2 * int(input()))\n```"
NUMBERS = {"inputs": ["1\n", "21\n", "-4\n"], "outputs": ["2\n", "42\n", "-8\n"]}
SQUARE = {"fn_name": "square", "inputs": ["3", "-5"], "outputs": ["9", "25"]}


def scored(solution, truth, **how):
    return compute_score("taco", f"```python\n{solution}\n```", truth, None, **how)


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_sources_are_scored(source):
    assert reward_for(source).function is compute_score


def test_standard_input_and_output():
    found = compute_score("apps", f"So:\n{DOUBLE}\nDone.", json.dumps(NUMBERS))
    assert (found["score"], found["acc"], found["passed"], found["tests"]) == (1, 1, 3, 3)
    half = scored("n = int(input())\nprint(2 * n if n > 0 else n)", NUMBERS)
    assert (half["score"], half["acc"]) == (pytest.approx(2 / 3), 0)
    assert half["why"].endswith("failed: test 2")
    found = scored("print(0)", NUMBERS, continuous=False)  # stops at the first failure
    assert (found["score"], found["tests"]) == (0, 1)
    assert compute_score("apps", DOUBLE, NUMBERS, continuous=False)["score"] == 1
    many = {"inputs": [str(n) for n in range(12)], "outputs": ["x"] * 12}
    assert scored("print('x')", many)["tests"] == 10


def test_functions_and_methods():
    assert scored("def square(n): return n * n", SQUARE)["score"] == 1
    assert scored("class Solution:\n    def square(self, n: int): return n * n", SQUARE)["score"] == 1
    assert scored("def square(n): return abs(n) * 3", SQUARE)["score"] == 0.5
    assert scored("def cube(n): return n", SQUARE)["score"] == 0
    two = {"fn_name": "add", "inputs": ['[1, 2]\n"a"', [[3], "b"]], "outputs": ['[[1, 2, "a"]]', [3, "b"]]}
    assert scored("def add(x: List[int], y): return tuple([*x, y])", two)["score"] == 1
    chatty = "def square(n):\n    print('9' * 10**6)\n    return n * n"
    assert scored(chatty, SQUARE)["score"] == 1
    found = scored("def square(n): return {n}", SQUARE)  # no JSON
    assert (found["score"], found["unserialisable"]) == (0, 2)


def test_statements():
    plain = {"assert_case": ["assert square(3) == 9", "assert square(-5) == 25"]}
    found = scored("def square(n): return n * n", plain)
    assert (found["score"], found["cooperative"]) == (1, 0)
    executed = {"assert_case": ["assert sorted(f([2, 1])) == [1, 2]", "assert f((1,)) == (1,)"]}
    found = scored("def f(x): return x", executed)
    assert (found["score"], found["cooperative"]) == (1, 2)
    assert scored("def f(x): return 0", executed)["score"] == 0
    assert scored("import os; os._exit(0)", executed)["score"] == 0


def test_a_program_that_takes_long_is_counted():
    sandbox.use(sandbox.Place(limits=sandbox.Limits(1.0, 512)))
    try:
        found = scored("while True: pass", {"inputs": [""], "outputs": [""]})
    finally:
        sandbox.use(sandbox.Place())
    assert (found["score"], found["timeouts"]) == (0, 1)


@pytest.mark.parametrize("truth", ["[]", "{}", "x", *({"inputs": i, "outputs": []} for i in (["1"], []))])
def test_a_ground_truth_without_tests_is_an_error(truth):
    refused(ValueError, lambda: scored("", truth), r"ground truth|Expecting")


NINETY_THREE = {"fn_name": "square", "inputs": ["93"], "outputs": ["8649"]}
"""A result that is not a constant in the code around the solution."""
FORGED = {  # each solution claims the answer without knowing it
    "print a result": "print('8649'); print('true')",
    "equal to everything": "class E(int):\n    def __eq__(s, o): return True\ndef square(n): return E(0)",
    "equal by its type": "class E:\n    def __eq__(s, o): return True\ndef square(n): return E()",
    "another dumps": "import json\njson.dumps = lambda x: '7'\ndef square(n): return 7",
    "another encoder": "import json.encoder as e\ne.c_make_encoder = None\ndef square(n): return 7",
    "another print": "import builtins\nbuiltins.print = lambda *a: None\ndef square(n): return 7",
    "end early": "import os; os._exit(0)",
    "exit early": "import sys; sys.exit(0)",
    "exit in the middle": "def square(n): raise SystemExit(0)",
    "a hook for errors": "import sys\nsys.excepthook = lambda *a: print('8649')\n1 / 0",
    "a tracer": "import sys\nsys.settrace(lambda *a: None)\ndef square(n): return 7",
    "at the end": "import atexit, os\natexit.register(lambda: os.write(1, b'8649'))\ndef square(n): return 7",
    "write to all": "import os\nfor f in range(99):\n    try: os.write(f, b'8649')\n    except OSError: pass",
    "close all files": "import os\nos.closerange(0, 99)\ndef square(n): return n * n",
    "search the frames": "import sys\ndef square(n):\n    f = sys._getframe()\n    while f:\n"
    "        for v in list(f.f_locals.values()) + list(f.f_globals.values()):\n"
    "            if v in ('8649', 8649): return v\n        f = f.f_back",
    "search the memory": "import gc\ndef square(n):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'outputs' in o: return int(o['outputs'][0])",
    "search the folder": "import os\ndef square(n):\n    for d, _, fs in os.walk('..'):\n"
    "        for f in fs:\n            if 'out' 'puts' in open(d + '/' + f).read(): return 8649",
    "the mark of answers": "import sys, os\ndef square(n):\n    f = sys._getframe(1)\n"
    "    os.write(f.f_locals['answers'], (f.f_locals['nonce'] + '7').encode()); os._exit(0)",
    "not a number": "def square(n): return float('nan')",
    "infinite": "def square(n): return float('inf')",
    "huge": "def square(n): return [0] * 10**7",
    "deep": "def square(n):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "many digits": "def square(n): return 10**4000",
    "true for one": "def square(n): return n == 93",
    "half of a surrogate pair": "def square(n): return '\\ud800'",
    "no bytes of text": "import os\ndef square(n): os.write(1, bytes(range(256))); return 7",
}


@pytest.mark.parametrize("name", slow_but(set(FORGED) - {"search the folder"}, FORGED))
def test_an_answer_cannot_be_forged(name):
    assert scored(FORGED[name], NINETY_THREE)["passed"] == 0
    assert scored(FORGED[name], {"inputs": ["93"], "outputs": ["81"]})["passed"] == 0


def test_the_expected_value_is_in_no_program(monkeypatch):
    seen, mark = [], "777123"
    monkeypatch.setattr(sandbox, "run", lambda *parts: seen.append("".join(parts)) or Run("finished"))
    scored("pass", {"inputs": ["1"], "outputs": [mark]})
    scored("pass", {"fn_name": "f", "inputs": ["1"], "outputs": [mark]})
    scored("pass", {"assert_case": [f"assert f(1) == {mark}"]})
    assert len(seen) == 3 and not any(mark in text for text in seen)
    scored("pass", {"assert_case": [f"assert f() < {mark}"]})
    assert mark in seen[3]


@pytest.mark.parametrize(("given", "expected", "same"), [
    ("1\n2\n", "1\n2", True), ("  1   2 \n\n3", "1 2\n3\n", True), ("1\n2", "1 2", False), ("", "", True),
    ("", "0", False), ("0.3333333333", "0.33333333", True), ("1.0 yes", "1 yes", True),
    ("10000000001", "10000000000", False), ("3.14", "3.15", False), ("nan", "1.5", False),
    ("1.5", "nan", False), ("inf", "1e308", False), ("YES", "yes", False),
])  # fmt: skip
def test_outputs_are_compared_by_words(given, expected, same):
    assert same_text(given, expected) is same


def test_values_are_compared_as_json_and_numbers_have_a_tolerance():
    assert same_value("[1, 2]", [1, 2]) and same_value("[1]", [[1]]) and same_value('{"1": 2}', {"1": 2})
    assert not same_value("[2, 1]", [1, 2]) and not same_value("", None) and not same_value("[" * 10**6, [])
    draw = random.Random()
    for _ in range(500):
        wanted = draw.uniform(-1, 1) * 10 ** draw.randint(-6, 6)
        given = wanted * (1 + draw.uniform(-3e-5, 3e-5)) + draw.uniform(-1e-9, 1e-9)
        near = math.fabs(given - wanted) <= 1e-8 + 1e-5 * math.fabs(wanted)
        assert same_text(repr(given), repr(wanted)) is near


@pytest.mark.parametrize(("response", "program"), [
    ("x\n```python\na\n```\ny\n```python\nb\n```\nz", "\nb\n"), ("```py\na\n```", "a\n"),
    ("```\na\n```", "\na\n".lstrip("\n")), ("print(1)", "print(1)"), ("```python\nprint(1)", "\nprint(1)"),
])  # fmt: skip
def test_the_program_in_a_response(response, program):
    assert program_in(response).strip() == program.strip()


def test_the_pool_runs_programs():
    said = []
    config = RewardConfig(num_workers=2, sandbox=SandboxConfig(timeout=1.5, memory_limit_mb=256))
    check_sources(["taco", "gsm8k"], None, config.sandbox, said.append)
    assert len(said) == 1 and said[0].startswith("programs that answer taco run here, under ")
    own = load_custom("tandem.rewards.programs", kwargs={"continuous": False})
    check_sources(["mine"], own, SandboxConfig(url="http://there"), said.append)
    assert said[1] == "programs that answer mine run on http://there"
    greedy = "```python\nx = bytearray(300 << 20); print(2)\n```"
    texts = [DOUBLE, "```python\nwhile True: pass\n```", greedy]
    pool = Pool(None, config)
    try:
        found = pool.score([Item("taco", text, {"inputs": ["1"], "outputs": ["2"]}) for text in texts])
    finally:
        pool.close()
        sandbox.use(sandbox.Place())
    assert [one.score for one in found] == [1, 0, 0] and [one.extra["timeouts"] for one in found] == [0, 1, 0]
