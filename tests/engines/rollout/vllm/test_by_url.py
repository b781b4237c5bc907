import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tandem.config.rollout import RolloutConfig, ServerConfig
from tandem.engines.rollout.base import WeightStream, generate
from tandem.engines.rollout.http.channel import Network
from tandem.engines.rollout.http.connection import Server, ServerLost
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.engines.rollout.vllm.process import serve
from tandem.engines.rollout.vllm.server import VLLMServerEngine
from tandem.errors import EngineError
from tests.contract.world import VOCABULARY
from tests.engines.rollout.case import CPU, stream, tokens
from tests.engines.rollout.vllm.models import build, check_samples, check_update, make_requests, save
from tests.engines.rollout.vllm.serving import check_abort_ends_on_the_server, serving
from tests.support.refusing import refused

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def connect(folder, *servers):
    urls = tuple(server.url for server in servers)
    server = ServerConfig(urls=urls, request_timeout=120.0, weights_backend="auto")
    rollout = RolloutConfig(name="vllm", mode="server", max_num_seqs=8, server=server)
    options = {"tokenizer": None, "device": CPU, "max_length": 96, "log": None, "dtype": torch.float32}
    return make_rollout_engine("vllm", rollout, model_path=str(folder), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(build(seed=9), folder)
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    def start(number):
        log = folder / f"server_{number}.log"
        return serve(str(folder), build().config, device=CPU, max_length=96, max_num_seqs=8, log=log)

    with ThreadPoolExecutor() as pool, ExitStack() as held:
        starting = [pool.submit(start, number) for number in range(2)]
        for each in starting:
            held.callback(each.result().close)
        yield [each.result() for each in starting]


def test_weights_arrive_over_the_network_again_and_again_and_mend_what_was_refused(folder, servers):
    engine = connect(folder, servers[0])
    assert isinstance(engine, VLLMServerEngine) and engine.takes == {WeightStream}
    engine._bucket_bytes = 20_000  # some buckets then hold one tensor, and some several
    refused(EngineError, lambda: engine.submit(make_requests(1)), "no weights")
    for version in (1, 2):
        check_update(engine, build(seed=version), version)
    refused(EngineError, lambda: engine.update_weights(stream(build("qwen3")), 3), "refused")
    refused(EngineError, lambda: engine.submit(make_requests(1)), "no weights")
    check_update(engine, build(seed=3), 4)
    engine.close()


def test_each_worker_of_a_server_over_two_devices_takes_its_part_of_the_weights(folder):
    (folder / "neutral").mkdir()
    (folder / "neutral" / "generation_config.json").write_text("{}")
    extension = "tandem.engines.rollout.vllm.worker.WorkerExtension"
    options = "--tensor-parallel-size 2 --max-model-len 96 --max-num-seqs 8 --load-format dummy "
    options += "--kv-cache-memory-bytes 4000000 --skip-tokenizer-init --enable-scale-out --logprobs-mode "
    options += (
        f"processed_logprobs --worker-extension-cls {extension} --generation-config {folder / 'neutral'}"
    )
    limits = {"max_length": 96, "max_num_seqs": 8, "bucket_bytes": 20_000}
    with serving(folder, *options.split(), environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as url:
        engine = VLLMServerEngine(Server(url), config=build().config, network=Network(CPU), **limits)
        for version in (1, 2):
            check_update(engine, build(seed=version), version)
        engine.close()


def test_several_servers_and_one_that_vanishes_while_weights_are_sent(folder, servers):
    """This is the last test of these servers, because it kills one."""
    engine = connect(folder, *servers)
    assert isinstance(engine, Router)
    check_update(engine, build(seed=4), 1)

    def dies(at, tensor):
        if at == "model.norm.weight":
            os.killpg(servers[1]._process.pid, signal.SIGKILL)
            servers[1]._process.wait(30)
        return tensor

    alone, began = connect(folder, servers[1]), time.monotonic()
    alone._bucket_bytes = 20_000
    error = refused(ServerLost, lambda: alone.update_weights(stream(build(seed=5), dies), 2))
    assert time.monotonic() - began < 60
    assert servers[1].url in str(error.got)
    alone.close()
    check_update(engine, build(seed=5), 2)  # the other server continues
    engine.close()


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(build(seed=9), folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    with serving(folder, "--max-model-len", "96", "--logprobs-mode", request.param) as url:
        made = OpenAIEngine(Server(url, request_timeout_s=120), max_length=96, max_num_seqs=8)
        made.raw = request.param == "raw_logprobs"
        yield made
        made.close()


def test_samples_of_the_model_and_of_other_distributions_where_the_server_tells_of_them(engine):
    requests, model = make_requests(6, n=2, temperature=1.0, max_tokens=20), build(seed=9)
    samples = generate(engine, requests)
    check_samples(model, requests, samples)
    assert {(len(sample.token_ids), sample.finish_reason) for sample in samples} == {(20, "length")}
    assert len({tuple(written) for written in tokens(samples)}) == 12
    check_abort_ends_on_the_server(engine)
    requests = make_requests(4, temperature=0.6)
    if engine.raw:
        error = refused(EngineError, lambda: generate(engine, requests), "another distribution")
        assert "--logprobs-mode processed_logprobs" in error.remedy
        return
    check_samples(model, requests, generate(engine, requests))
    one = generate(engine, make_requests(3, temperature=0.6, top_k=1, max_tokens=8))
    assert tokens(one) == tokens(generate(engine, make_requests(3, temperature=0.0, max_tokens=8)))
    np.testing.assert_allclose(np.concatenate([sample.log_probs for sample in one]), 0.0, atol=1e-6)
    stop = int(one[0].token_ids[5])
    [cut] = generate(engine, make_requests(1, temperature=0.0, max_tokens=20, stop_token_ids=(stop,)))
    assert cut.finish_reason == "stop" and cut.token_ids.tolist().index(stop) == len(cut.token_ids) - 1
