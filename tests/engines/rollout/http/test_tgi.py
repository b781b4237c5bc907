"""Tests of the engine on TGI's server, whose prompts are texts."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tandem.engines.rollout.base import RolloutEngine, generate
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.connection import Server, ServerLost
from tandem.engines.rollout.http.tgi import TGIEngine
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams
from tests.engines.rollout.http.fakes import FakeTGI, scripted


def tokenizer(*, begins=False):
    raw = Tokenizer(models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        raw.post_processor = processors.TemplateProcessing(single="t2 $A", special_tokens=[("t2", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="t0", eos_token="t1")


@pytest.fixture
def server():
    with FakeTGI() as fake:
        yield fake


@pytest.fixture
def make():
    made = []

    def build(fake, words=None, **limits):
        made.append(TGIEngine(Server(fake.url, **limits), tokenizer=words or tokenizer(), max_length=64))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def request(length=5, **params):
    given = {"max_tokens": 6, "stop_token_ids": (1,), **params}
    return Request("u", 0, np.arange(3, 3 + length), SamplingParams(**given))


def script(request, count):
    written = scripted(request.prompt_ids.tolist(), {"seed": seed_of(request)})
    return [next(written) for _ in range(count)]


def test_a_sample(server, make):
    engine = make(server)
    assert isinstance(engine, RolloutEngine)
    wanted = request()
    (sample,) = generate(engine, [wanted])
    expected = script(wanted, 6)
    assert sample.token_ids.tolist() == [token for token, _, _ in expected]
    np.testing.assert_array_equal(sample.log_probs, np.float32([value for _, value, _ in expected]))
    assert (sample.finish_reason, engine.progress()) == ("length", 6)
    (body,) = server.bodies("/generate")
    assert body == {
        "inputs": "t3 t4 t5 t6 t7",
        "parameters": {
            "temperature": 1.0,
            "do_sample": True,
            "repetition_penalty": 1.0,
            "max_new_tokens": 6,
            "stop": [],
            "seed": seed_of(wanted),
            "details": True,
            "decoder_input_details": True,
            "return_full_text": False,
        },
    }


def test_sampling_parameters(server, make):
    wanted = request(temperature=0.5, top_k=4, top_p=0.8, repetition_penalty=1.3, stop=("end",))
    (sample,) = generate(make(server), [wanted])
    assert sample.untruncated_log_probs is None
    params = server.bodies("/generate")[0]["parameters"]
    assert (params["temperature"], params["top_k"], params["top_p"]) == (0.5, 4, 0.8)
    assert (params["repetition_penalty"], params["stop"]) == (1.3, ["end"])


def test_greedy(server, make):
    generate(make(server), [request(temperature=0.0, top_k=3)])
    params = server.bodies("/generate")[0]["parameters"]
    assert params["do_sample"] is False
    assert not {"temperature", "top_k", "top_p"} & params.keys()


def test_the_models_end_token_stops(server, make):
    wanted = request(max_tokens=30)
    server.end_token = script(wanted, 9)[8][0]
    right = request(max_tokens=30, stop_token_ids=(server.end_token,))
    (sample,) = generate(make(server), [right])
    assert (len(sample.token_ids), sample.finish_reason) == (9, "stop")
    with pytest.raises(EngineError, match="stop tokens"):
        generate(make(server), [wanted])


def test_a_stop_token_that_the_server_does_not_know(server, make):
    wanted = request(max_tokens=30)
    other = script(wanted, 9)[8][0]
    with pytest.raises(EngineError, match="stop tokens"):
        generate(make(server), [request(max_tokens=30, stop_token_ids=(1, other))])


def test_a_tokenizer_that_begins_every_text_does_so_once(server, make):
    server.prefix = (2,)
    begun = Request("u", 0, np.array([2, 5, 6]), SamplingParams(max_tokens=3, stop_token_ids=(1,)))
    engine = make(server, tokenizer(begins=True))
    assert len(generate(engine, [begun])[0].token_ids) == 3
    assert server.bodies("/generate")[0]["inputs"] == "t5 t6"
    with pytest.raises(EngineError, match="token 0 differs") as caught:
        generate(engine, [request()])
    assert "3, 5 tokens in all" in caught.value.expected


def test_another_tokenizer_on_the_server(server, make):
    server.faults.append("echo")
    with pytest.raises(EngineError, match="token 2 differs") as caught:
        generate(make(server), [request()])
    assert "6, 5 tokens in all" in caught.value.got
    assert caught.value.expected == "5, 5 tokens in all"


@pytest.mark.parametrize(
    "params", [{"min_p": 0.1}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"min_tokens": 2}]
)
def test_parameters_it_does_not_have(server, make, params):
    engine = make(server)
    with pytest.raises(EngineError, match="does not support") as caught:
        engine.submit([request(**params)])
    assert caught.value.field == next(iter(params))
    assert server.bodies("/generate") == []


def test_failures(server, make):
    engine = make(server, request_timeout_s=0.3)
    engine.submit([])
    for fault, kind, message in (
        ("422", EngineError, "refused"),
        ("500", ServerLost, "refused"),
        ("hang", ServerLost, "did not complete"),
    ):
        server.faults.append(fault)
        with pytest.raises(kind, match=message):
            generate(engine, [request()])
    assert engine.pending() == 0


def test_no_new_weights(server, make):
    with pytest.raises(EngineError, match="cannot give its server new weights"):
        make(server).update_weights(None, 1)
