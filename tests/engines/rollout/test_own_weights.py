import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engines.rollout.base import SharedModule, WeightStream, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.models.weight_files import persistent_buffers
from tests.engines.rollout.case import CPU, native, request, stream, tokens
from tests.support.families import make_family
from tests.support.refusing import refused

NAMES = ("native-fused", "native-module", "hf")


def trained(model, dtype):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def bytes_held(own):
    return sum(parameter.untyped_storage().nbytes() for parameter in own._module.parameters())


@pytest.fixture
def own(tiny, tmp_path):
    """Return a function that makes own weights from a folder with only a model's config."""

    def make(name="qwen2"):
        tiny(name).config.save_pretrained(tmp_path / name)
        return OwnWeights(tmp_path / name, CPU)

    return make


def make_engine(name, own, **options):
    if name == "hf":
        return HFEngine(device=CPU, max_length=96, own=own, **options)
    return native(runner=name.removeprefix("native-"), max_length=96, own=own, **options)


@pytest.mark.parametrize(
    ("name", "model", "dtype"),
    [
        *((name, "qwen2", torch.float32) for name in NAMES),  # the model has tied weights
        ("native-fused", "llama3_rope", torch.float64),
        ("native-fused", "qwen3", torch.bfloat16),
        ("native-module", "gemma3_text", torch.float32),  # two kinds of rotary tables, and scaled embeddings
        ("hf", "gemma2", torch.bfloat16),
    ],
)
def test_writes_the_bits_that_the_shared_module_gives(name, model, dtype, tiny, own, make_requests):
    module = trained(tiny(model), dtype)
    requests = make_requests(8, 2, temperature=0.9, top_p=0.9)
    engine = make_engine(name, own(model))
    assert engine.takes == {SharedModule, WeightStream}
    expected_digest = engine.update_weights(SharedModule(module), 0)
    expected = generate(engine, requests)
    engine.sleep()
    assert engine.update_weights(stream(module), 1) == expected_digest == digest(module.named_parameters())
    assert engine._source.module is not module
    for sample, other in zip(generate(engine, requests), expected, strict=True):
        assert np.array_equal(sample.token_ids, other.token_ids)
        assert np.array_equal(sample.log_probs, other.log_probs) and set(sample.versions) == {1}


@pytest.mark.parametrize("model", ["qwen2", "llama3_rope", "gemma3_text"])
def test_the_module_is_the_trainers_in_all_but_memory(model, tiny, own):
    module = trained(tiny(model), torch.bfloat16)
    mine = own(model).load(stream(module)).module
    for name, parameter in module.named_parameters():
        held = mine.get_parameter(name)
        assert torch.equal(held, parameter) and held.dtype == torch.bfloat16 and not held.requires_grad
    tied = [
        each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (mine, module)
    ]
    assert tied[0] == tied[1]
    buffers = dict(module.named_buffers())
    assert dict(mine.named_buffers()).keys() == buffers.keys()
    for name, buffer in mine.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)
    assert not mine.training


def test_it_takes_memory_with_the_first_stream_and_not_while_it_sleeps(tiny, own, make_requests):
    engine = make_engine("native-fused", own())
    assert engine._own._module is None
    module, requests = tiny(), make_requests(4)
    whole = sum(parameter.numel() * 4 for parameter in module.parameters())
    engine.update_weights(stream(module), 0)
    expected = tokens(generate(engine, requests))
    for tag, left in (("kv_cache", whole), ("weights", 0)):
        assert bytes_held(engine._own) == whole
        engine.sleep([tag])
        assert bytes_held(engine._own) == left
    engine.update_weights(stream(module), 1)
    assert bytes_held(engine._own) == whole and tokens(generate(engine, requests)) == expected
    engine.update_weights(SharedModule(module), 2)
    assert bytes_held(engine._own) == 0


def test_weights_may_come_in_another_type_later(tiny, own, make_requests):
    engine, requests, module = make_engine("native-fused", own()), make_requests(4), tiny(dtype=torch.float64)
    runs = []
    for version, source in enumerate((stream(tiny()), stream(module), SharedModule(module))):
        engine.update_weights(source, version)
        runs.append(generate(engine, requests))
    for sample, other in zip(*runs[1:], strict=True):
        assert sample.log_probs.dtype == np.float64 and np.array_equal(sample.log_probs, other.log_probs)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def given(*tensors):
    return WeightStream(iter(tensors))


FAULTS = {
    "missing": (lambda m: stream(m, lambda at, t: None if at == Q_PROJ else t), Q_PROJ, "too early"),
    "nothing": (lambda m: given(), EMBEDDING, "too early"),
    "shape": (lambda m: stream(m, lambda at, t: t[:3] if at == Q_PROJ else t), Q_PROJ,
              r"shape(.|\n)*\(3, 32\)(.|\n)*\(32, 32\)"),
    "twice": (lambda m: given(*m.named_parameters(), (Q_PROJ, torch.zeros(32, 32))), Q_PROJ, "twice"),
    "unknown": (lambda m: given(("model.extra", torch.zeros(3))), "model.extra", "Qwen2ForCausalLM"),
    "tied": (lambda m: given(*m.state_dict().items()), "lm_head.weight", f"only {EMBEDDING}"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["native-fused", "hf"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_is_not_the_model_is_refused_and_nothing_sampled_from_it(
    name, fault, tiny, own, make_requests
):
    broken, field, message = FAULTS[fault]
    engine, requests = make_engine(name, own()), make_requests(2)
    refused(EngineError, lambda: engine.update_weights(given(), 0), "some weights")  # it never had any
    engine.update_weights(stream(tiny()), 0)
    expected = tokens(generate(engine, requests))
    error = refused(EngineError, lambda: engine.update_weights(broken(tiny()), 1), message)
    assert error.field == field
    refused(EngineError, lambda: generate(engine, requests), "no weights")
    engine.update_weights(stream(tiny()), 2)
    assert tokens(generate(engine, requests)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_without_a_model_of_its_own_a_stream_is_refused_and_the_weights_stay(name, tiny):
    engine = make_engine(name, None)
    assert engine.takes == {SharedModule}
    engine.update_weights(SharedModule(tiny()), 0)
    refused(EngineError, lambda: engine.update_weights(stream(tiny()), 1), "expected: a SharedModule")
    [sample] = generate(engine, [request()])
    assert set(sample.versions) == {0}


def test_constants_come_with_the_stream(tmp_path):
    """The experts' biases of GLM-4 are not parameters."""
    folder = make_family(tmp_path, "glm4_moe")
    model, own = AutoModelForCausalLM.from_pretrained(folder), OwnWeights(folder, CPU)
    constants = persistent_buffers(model)
    for constant in constants.values():
        constant.add_(1.0)
    found = persistent_buffers(own.load(stream(model)).module)
    assert found and all(torch.equal(found[name], value) for name, value in constants.items())
    parameters = WeightStream(iter(model.named_parameters()))
    assert refused(EngineError, lambda: own.load(parameters), "too early").field == next(iter(constants))
