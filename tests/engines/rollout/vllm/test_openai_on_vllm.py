"""Tests of the OpenAI adapter on a real vLLM API server, started as users start it.

See `make test-vllm`.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams
from tests.engines.rollout.vllm.models import VOCABULARY, build, log_probs, make_requests, save
from tests.engines.rollout.vllm.serving import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SEED = 9


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Yield the log-probs mode and the URL of a server."""
    folder = tmp_path_factory.mktemp("model")
    save(build(seed=SEED), folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    with serving(folder, "--max-model-len", "96", "--logprobs-mode", request.param) as url:
        yield request.param, url


@pytest.fixture
def engine(server: tuple) -> Iterator[OpenAIEngine]:
    made = OpenAIEngine(Server(server[1], request_timeout_s=120), max_length=96, max_num_seqs=8)
    yield made
    made.close()


def running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as said:
        lines = said.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_samples_of_the_model_as_it_is(server, engine):
    """The generation config in the model's folder is ignored."""
    model = build(seed=SEED)
    requests = make_requests(6, n=2, temperature=1.0, max_tokens=20)
    samples = generate(engine, requests)
    for request, sample in zip(requests, samples, strict=True):
        assert len(sample.token_ids) == 20 and sample.finish_reason == "length"
        np.testing.assert_allclose(sample.log_probs, log_probs(model, request, sample), atol=1e-4, rtol=0)
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 12


def test_other_distributions_where_the_server_tells_of_them(server, engine):
    mode, _ = server
    requests = make_requests(4, temperature=0.6, max_tokens=12)
    if mode == "raw_logprobs":
        with pytest.raises(EngineError, match="another distribution") as caught:
            generate(engine, requests)
        assert "--logprobs-mode processed_logprobs" in caught.value.remedy
        return
    model = build(seed=SEED)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        np.testing.assert_allclose(sample.log_probs, log_probs(model, request, sample), atol=1e-4, rtol=0)
    one = make_requests(3, temperature=0.6, top_k=1, max_tokens=8)
    greedy = make_requests(3, temperature=0.0, max_tokens=8)
    for cut, best in zip(generate(engine, one), generate(engine, greedy), strict=True):
        assert cut.token_ids.tolist() == best.token_ids.tolist()
        np.testing.assert_allclose(cut.log_probs, 0.0, atol=1e-6)


def test_stop_tokens_end_a_response_and_belong_to_it(engine):
    [whole] = generate(engine, make_requests(1, temperature=0.0, max_tokens=20))
    stop = int(whole.token_ids[5])
    first = whole.token_ids.tolist().index(stop)
    [cut] = generate(engine, make_requests(1, temperature=0.0, max_tokens=20, stop_token_ids=(stop,)))
    assert cut.token_ids.tolist() == whole.token_ids[: first + 1].tolist()
    assert cut.finish_reason == "stop"


def test_an_aborted_request_ends_there_too(server, engine):
    request = Request("long", 0, np.arange(5), SamplingParams(max_tokens=90))
    engine.submit([request])
    until = time.monotonic() + 30
    while not running(server[1]) and time.monotonic() < until:
        engine.poll(0.0)
    [partial] = engine.abort([request.id], keep_partial=True)
    assert len(partial.token_ids) < 90
    while running(server[1]) and time.monotonic() < until:
        time.sleep(0.05)
    assert running(server[1]) == 0
