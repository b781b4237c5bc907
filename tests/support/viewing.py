"""A run with data for every page of `tandem view`, and a client of its server."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tandem.observability.run import RunFolder
from tandem.protocol import Ragged
from tandem.viewer.api import Api
from tandem.viewer.server import Server
from tandem.viewer.shelf import Shelf

STEPS, PROMPTS, GROUP = 6, 2, 4
WORDS = ["<pad>", "what", "is", "the", "answer", "seven", "eight", "call", "result", "end"]
TOKENS = [1, 2, 5, 4, 7, 8, 5, 9]
"""A prompt of two tokens, then a response with one token in the middle that a tool wrote (`result`)."""
MASK = [False, False, True, True, True, False, True, True]
START = 1_700_000_000.0


def write_viewed(path: Path, *, steps: int = STEPS, model: Path | None = None) -> Path:
    """Write a finished run; in step s, the four scores of the first prompt are s / 10, of the second 1."""
    folder = RunFolder(path)
    tokenizer = model or path / "model"
    tokenizer.mkdir(exist_ok=True)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.save(str(tokenizer / "tokenizer.json"))
    folder.write_config(
        f"actor_rollout_ref: {{model: {{path: {tokenizer}}}}}\nalgorithm: {{adv_estimator: grpo}}\n"
        "trainer: {samples_freq: 1}\n"
    )
    folder.event("start", step=0, total_steps=steps, format=1)
    for step in range(1, steps + 1):
        write_viewed_step(folder, step)
    stale = "The log-probs differ: stale weights, 2 updates behind"
    folder.event("warning", name="stale", step=3, text=stale)
    folder.event("warning", name="entropy_collapsed", step=4, text="the entropy has fallen")
    folder.event("start", step=4, total_steps=steps, format=1)
    folder.event("end", how="finished")
    folder.log("a worker was lost and is back")
    folder.log("saved it")
    checkpoint = path / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    manifest = {"format": 1, "step": 4, "files": {"a": {}, "b": {}}, "sha256": "0123456789abcdef" * 4}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    _write_timeline(folder.timeline_file, steps)
    return path


def write_viewed_step(folder: RunFolder, step: int) -> None:
    metrics = {"reward/mean": step / 10, "actor/entropy": 1 / step, "timing/step": 2.0}
    metrics |= {"perf/collective_s/actor": 0.25, "perf/transfer_s/actor": 0.25, "perf/busy_share/actor": 0.5}
    metrics |= {"perf/transfer_bytes/actor": 2e6, "rollout/version_lag": 0.0}
    metrics |= {"rollout/log_prob_diff_mean": 1e-3, "rollout/log_prob_diff_limit": 1e-4}
    folder.log_metrics(step, metrics)
    folder.write_samples(step, sample_table(step))


def sample_table(step: int, responses: list[str] | None = None) -> dict[str, Any]:
    count = PROMPTS * GROUP
    prompts = [number // GROUP for number in range(count)]

    def ragged(values: list[float], dtype: torch.dtype) -> Ragged:
        return Ragged.from_list([values] * count, dtype)

    log_probs = [-0.1 * number for number in range(len(TOKENS))]
    return {
        "tokens": ragged(TOKENS, torch.int64),
        "response_mask": ragged(MASK, torch.bool),
        "rollout_log_probs": ragged(log_probs, torch.float32),
        "old_log_probs": ragged([value + 0.5 for value in log_probs], torch.float32),
        "advantages": ragged([0, 0, 1.5, -1.5, 0.5, 0, float("nan"), 2], torch.float32),
        "policy_version": ragged([0, 0, *[step] * 6], torch.int32),
        "scores": torch.tensor([step / 10 if prompt == 0 else 1.0 for prompt in prompts]),
        "uid": np.array([f"{step}-{prompt}" for prompt in prompts], dtype=object),
        "sample": [number % GROUP for number in range(count)],
        "messages": [[{"role": "user", "content": f"what is {prompt}"}] for prompt in prompts],
        "response_text": responses or [f"Answer {number} of step {step}" for number in range(count)],
        "reward_extra": [{"acc": 0.25}] * count,
        "reward_why": ["answer 7, expected 8"] * count,
        "ground_truth": ["8"] * count,
        "data_source": ["sums" if prompt == 0 else "words" for prompt in prompts],
        "finish_reason": ["stop" if number % 2 else "length" for number in range(count)],
    }


def many_samples(count: int) -> dict[str, Any]:
    copies = {
        name: [column[0]] * count if isinstance(column, list) else column[[0] * count]
        for name, column in sample_table(1).items()
    }
    return copies | {"scores": np.arange(count, dtype=np.float32), "uid": np.array(["one"] * count, object)}


def _write_timeline(path: Path, steps: int) -> None:
    """Write two seconds per step: rank 0 generates for 0.5 s, rank 1 for 1 s, then both update."""
    lines: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "args": {"name": name}, "pid": 1, "tid": tid}
        for tid, name in enumerate(("controller", "actor rank 0", "actor rank 1"), 1)
    ]
    spans = [(2, "gen", 0.0, 0.5), (3, "gen", 0.0, 1.0), (2, "update_actor", 1.0, 2.0)]
    spans += [(3, "update_actor", 1.0, 2.0), (1, "step", 0.0, 2.0)]
    for step in range(1, steps + 1):
        for tid, name, start, end in spans:
            begin = {"step": step} if name == "step" else {}
            for kind, when, args in (("B", start, begin), ("E", end, {})):
                at = (START + 3 * step + when) * 1e6
                lines.append({"name": name, "ph": kind, "ts": at, "args": args, "pid": 1, "tid": tid})
    path.write_text("[\n" + "".join(json.dumps(line) + ",\n" for line in lines))


class Client:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self.path = urlsplit(server.url).path

    def get(self, path: str, *, method: str = "GET", host: str = "", whole: bool = False) -> tuple[int, Any]:
        """Return status and body (and headers) of a path below the token's path or, with "/", the root."""
        connection = HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        target = path if path.startswith("/") else self.path + path
        connection.request(method, target, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, (body, dict(answer.headers)) if whole else body

    def ask(self, name: str, expected: int = 200, **params: object) -> Any:
        status, body = self.get(f"api/{name}?{urlencode(params)}")
        assert status == expected, body
        return json.loads(body)


@contextmanager
def viewing(*folders: Path) -> Iterator[Client]:
    with Shelf(folders) as shelf, Server(Api(shelf)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        client = Client(server)
        for view in shelf.runs():
            await_samples(client, view.name)
        yield client
        server.shutdown()


def await_samples(client: Client, run: str, files: int | None = None) -> None:
    """Wait until the index has all files of samples, or the given number."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = next(each for each in client.ask("runs") if each["run"] == run)
        with client.server.api._shelf.get(run).lock:
            pending = client.server.api._shelf.get(run).samples.pending()
        if not pending and found["indexed"] >= (files or 0):
            return
        time.sleep(0.02)
    raise AssertionError(f"the samples of {run} were not read in 30 seconds")
