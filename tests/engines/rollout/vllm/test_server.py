import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.vllm.process import serve
from tandem.engines.rollout.vllm.server import VLLMServerEngine
from tandem.errors import EngineError
from tests.contract.rollout import RolloutContract
from tests.contract.world import EngineKind
from tests.engines.rollout.case import CPU, request, stream, wait_for
from tests.engines.rollout.vllm.models import build, check_update, make_requests, save
from tests.engines.rollout.vllm.serving import check_abort_ends_on_the_server, running
from tests.support.refusing import refused

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # a starting server imports vLLM three times


def start(folder, model, decode=None, bucket_bytes=1 << 20, **limits):
    process = serve(str(folder), model.config, device=CPU, log=folder / "server.log", **limits)
    options = {"config": model.config, "process": process, "decode": decode, "bucket_bytes": bucket_bytes}
    limits = {name: limits[name] for name in ("max_length", "max_num_seqs")}
    return VLLMServerEngine(Server(process.url, request_timeout_s=120), **options, **limits)


class TestVLLMServer(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls):
        def make(world, **options):
            return start(world.folder, world.module, world.decode, **options)

        options = {"keyed": False, "recomputes": True, "untruncated": False, "modes": ()}
        return EngineKind("vllm-server", make, stream, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Yield an engine whose model has tied embeddings. Some weight buckets hold one tensor, some several."""
    folder = tmp_path_factory.mktemp("model")
    save(build(seed=9), folder)
    engine = start(folder, build(), max_length=96, max_num_seqs=8, bucket_bytes=20_000)
    yield engine
    engine.close()


def test_refused_weights_leave_a_server_without_and_new_ones_mend_it(made):
    made.update_weights(stream(build()), 0)
    check_abort_ends_on_the_server(made)
    refused(EngineError, lambda: made.update_weights(stream(build("qwen3")), 1), "refused")
    refused(EngineError, lambda: made.submit(make_requests(1)), "no weights")
    check_update(made, build(), 2)


def test_a_server_killed_in_mid_generation_names_what_was_pending(made):
    """This is the last test, because it kills the server."""
    made.update_weights(stream(build()), 0)
    requests = [request("long", i, np.arange(5), max_tokens=90) for i in range(3)]
    group = made._process._process.pid
    while made.pending() < 3:
        if not made.pending():  # they may be finished before they are seen
            made.submit(requests)
        while made.pending() and not running(made.server.url):
            made.poll(0.0)
        os.killpg(group, signal.SIGSTOP)
        made.poll(0.5)  # those that finished before the server was stopped
        if made.pending() < 3:
            os.killpg(group, signal.SIGCONT)
            made.poll(0.1)
    os.killpg(group, signal.SIGKILL)
    error = refused(EngineError, lambda: made.poll(30.0), "ended with status -9")
    assert error.field.startswith("3 requests pending, the first: request ('long', ")
    assert "server.log" in error.got


def test_a_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(EngineError, match="ended with status 1") as caught:
        serve(str(tmp_path), build().config, device=CPU, max_length=64, log=tmp_path / "log")
    assert "no such model" in (tmp_path / "log").read_text()
    assert caught.value.got.startswith(str(tmp_path / "log"))


KILLED = """
import sys, time
from pathlib import Path
import torch
from transformers import AutoConfig
from tandem.engines.rollout.vllm.process import serve
folder = Path(sys.argv[1])
made = serve(str(folder), AutoConfig.from_pretrained(folder), device=torch.device("cpu"), max_length=64,
             max_num_seqs=4, log=folder / "server.log")
print(made._process.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_a_trainer_that_is_killed(tmp_path):
    command = [sys.executable, "-c", KILLED, save(build(), tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        group = int(trainer.stdout.readline())
        assert alive(group)
        trainer.kill()
        wait_for(lambda: not alive(group))
        assert not alive(group)


def alive(group):
    """Return the processes of a process group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(int(path.parent.name))
    return found
