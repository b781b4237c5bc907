"""Tests of the OpenAI adapter on a real vLLM API server, started as users start it. See `make test-vllm`."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.errors import EngineError
from tests.contract.world import VOCABULARY
from tests.engines.rollout.case import tokens
from tests.engines.rollout.vllm.models import build, check_samples, make_requests, save
from tests.engines.rollout.vllm.serving import check_abort_ends_on_the_server, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
MODEL = {"seed": 9}


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(build(**MODEL), folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    with serving(folder, "--max-model-len", "96", "--logprobs-mode", request.param) as url:
        made = OpenAIEngine(Server(url, request_timeout_s=120), max_length=96, max_num_seqs=8)
        made.raw = request.param == "raw_logprobs"
        yield made
        made.close()


def test_samples_of_the_model_as_it_is(engine):
    """The generation config in the model's folder is ignored."""
    requests = make_requests(6, n=2, temperature=1.0, max_tokens=20)
    samples = generate(engine, requests)
    check_samples(build(**MODEL), requests, samples)
    assert {(len(sample.token_ids), sample.finish_reason) for sample in samples} == {(20, "length")}
    assert len({tuple(written) for written in tokens(samples)}) == 12


def test_other_distributions_where_the_server_tells_of_them(engine):
    requests = make_requests(4, temperature=0.6)
    if engine.raw:
        with pytest.raises(EngineError, match="another distribution") as caught:
            generate(engine, requests)
        assert "--logprobs-mode processed_logprobs" in caught.value.remedy
        return
    check_samples(build(**MODEL), requests, generate(engine, requests))
    one = generate(engine, make_requests(3, temperature=0.6, top_k=1, max_tokens=8))
    assert tokens(one) == tokens(generate(engine, make_requests(3, temperature=0.0, max_tokens=8)))
    np.testing.assert_allclose(np.concatenate([sample.log_probs for sample in one]), 0.0, atol=1e-6)


def test_stop_tokens_end_a_response_and_belong_to_it(engine):
    [whole] = tokens(generate(engine, make_requests(1, temperature=0.0, max_tokens=20)))
    stop = whole[5]
    [cut] = generate(engine, make_requests(1, temperature=0.0, max_tokens=20, stop_token_ids=(stop,)))
    assert cut.token_ids.tolist() == whole[: whole.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_an_aborted_request_ends_there_too(engine):
    check_abort_ends_on_the_server(engine)
