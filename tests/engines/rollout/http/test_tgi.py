import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tandem.engines.rollout.base import RolloutEngine, generate
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.connection import Server, ServerLost
from tandem.engines.rollout.http.tgi import TGIEngine
from tandem.errors import EngineError
from tests.engines.rollout import case
from tests.engines.rollout.http.fakes import FakeTGI
from tests.engines.rollout.http.test_openai import script
from tests.support.refusing import refused


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
def make(server):
    made = []

    def build(words=None, **limits):
        made.append(TGIEngine(Server(server.url, **limits), tokenizer=words or tokenizer(), max_length=64))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def request(prompt=(3, 4, 5, 6, 7), **params):
    return case.request("u", 0, prompt, **{"max_tokens": 6, "stop_token_ids": (1,), **params})


def test_a_sample(server, make):
    engine, wanted = make(), request()
    assert isinstance(engine, RolloutEngine)
    (sample,) = generate(engine, [wanted])
    tokens, log_probs = script(wanted)
    assert sample.token_ids.tolist() == tokens
    np.testing.assert_array_equal(sample.log_probs, log_probs)
    assert (sample.finish_reason, engine.progress()) == ("length", 6)
    (body,) = server.bodies()
    asked = {"temperature": 1.0, "do_sample": True, "repetition_penalty": 1.0, "max_new_tokens": 6}
    asked |= {"stop": [], "seed": seed_of(wanted), "return_full_text": False}
    asked |= {"details": True, "decoder_input_details": True}
    assert body == {"inputs": "t3 t4 t5 t6 t7", "parameters": asked}


def test_sampling_parameters(server, make):
    params = {"temperature": 0.5, "top_k": 4, "top_p": 0.8, "repetition_penalty": 1.3}
    engine = make()
    (sample,) = generate(engine, [request(**params, stop=("end",))])
    assert sample.untruncated_log_probs is None
    generate(engine, [request(temperature=0.0, top_k=3)])
    drawn, greedy = (body["parameters"] for body in server.bodies())
    assert params.items() <= drawn.items() and drawn["stop"] == ["end"]
    assert greedy["do_sample"] is False and not {"temperature", "top_k", "top_p"} & greedy.keys()


def test_the_models_end_token_stops_and_no_other_can(server, make):
    tokens, _ = script(request(), 9)
    with pytest.raises(EngineError, match="stop tokens"):  # the server does not know this one
        generate(make(), [request(max_tokens=30, stop_token_ids=(1, tokens[8]))])
    server.end_token = tokens[8]
    (sample,) = generate(make(), [request(max_tokens=30, stop_token_ids=(tokens[8],))])
    assert (len(sample.token_ids), sample.finish_reason) == (9, "stop")
    refused(EngineError, lambda: generate(make(), [request(max_tokens=30)]), "stop tokens")


def test_a_tokenizer_begins_a_text_once_and_another_one_on_the_server_is_told(server, make):
    server.prefix, engine = (2,), make(tokenizer(begins=True))
    assert len(generate(engine, [request((2, 5, 6), max_tokens=3)])[0].token_ids) == 3
    assert server.bodies()[0]["inputs"] == "t5 t6"
    error = refused(EngineError, lambda: generate(engine, [request()]), "token 0 differs")
    assert "3, 5 tokens in all" in error.expected
    server.prefix = ()
    server.faults.append("echo")
    error = refused(EngineError, lambda: generate(make(), [request()]), "token 2 differs")
    assert "6, 5 tokens in all" in error.got and error.expected == "5, 5 tokens in all"


@pytest.mark.parametrize("name", ["min_p", "presence_penalty", "frequency_penalty", "min_tokens"])
def test_parameters_it_does_not_have(server, make, name):
    with pytest.raises(EngineError, match="does not support") as caught:
        make().submit([request(**{name: 2 if name == "min_tokens" else 0.1})])
    assert caught.value.field == name
    assert server.bodies() == []


def test_more_stop_strings_than_the_server_accepts(server, make):
    error = refused(EngineError, lambda: make().submit([request(stop=tuple("abcde"))]), "stop strings")
    assert (error.field, error.expected) == ("stop", "at most 4")
    assert len(generate(make(), [request(stop=tuple("abcd"))])[0].token_ids) == 6


def test_failures(server, make):
    engine = make(request_timeout_s=0.3)
    engine.submit([])
    for fault, kind, message in (
        ("422", EngineError, "refused"), ("500", ServerLost, "refused"), ("hang", ServerLost, "complete"),
    ):  # fmt: skip
        server.faults.append(fault)
        with pytest.raises(kind, match=message):
            generate(engine, [request()])
    assert engine.pending() == 0
    refused(EngineError, lambda: engine.update_weights(None, 1), "cannot give its server new weights")
