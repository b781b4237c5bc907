"""Changed models are loaded: their fields are checked, and their embeddings have the asked number of rows."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.config.changed_models import changed_folder
from tandem.errors import ModelError
from tandem.models.loading import load_config, load_policy, load_scorer
from tandem.models.resized import complete_weights
from tandem.models.vocabulary import check_reader
from tandem.protocol import DataProto, Ragged
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import make_batch, make_engine, output, weights
from tests.support.tiny import make_model, make_tokenizer

WRONG = [
    ({"max_positon_embeddings": 64}, "max_positon_embeddings", "did you mean max_position_embeddings?"),
    ({"rope_scaling": {"type": "yern", "factor": 2.0}}, "rope_type", "did you mean yarn?"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fats": 1}},
        "beta_fats",
        "did you mean beta_fast?",
    ),
    ({"rope_scaling": {"type": "yarn", "facto": 2.0}}, "override_config", "correct or remove"),
    ({"max_position_embeddings": "many"}, "override_config", "correct or remove"),
    ({"intermediate_size": 32}, "override_config", "correct or remove"),
]


@pytest.mark.parametrize(("override", "field", "remedy"), WRONG)
def test_a_wrong_field_is_named(tmp_path, override, field, remedy):
    folder = changed_folder(str(make_model(tmp_path / "model")), override, None)
    with pytest.raises(ModelError) as wrong:
        load_policy(folder)
    assert wrong.value.field.startswith("model.override_config")
    assert wrong.value.field.endswith(field) and remedy in wrong.value.remedy


def mean_of(table):
    return torch.stack([row.double() for row in table]).mean(0).to(table.dtype)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [64, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_the_mean_and_old_rows_stay(tmp_path, tied, rows, dtype):
    path = make_model(tmp_path / "model", tie_word_embeddings=tied, dtype=dtype)
    folder = changed_folder(str(path), {}, rows)
    for _ in range(2):  # the second call finds the files
        complete_weights(folder)
    old, new = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (path, folder))
    assert old.keys() == new.keys()
    for name, value in old.items():
        added = [mean_of(value)] * (rows - len(value)) if "embed" in name or "lm_head" in name else []
        wanted = torch.cat([value, *(row[None] for row in added)])
        assert torch.equal(new[name], wanted[:rows] if added or len(value) == 46 else wanted)
    assert new["model.embed_tokens.weight"].shape[0] == rows


def test_a_file_that_changes_is_written_again(tmp_path):
    folder = changed_folder(str(make_model(tmp_path / "model")), {}, 64)
    complete_weights(folder)
    make_model(tmp_path / "model", seed=1)
    complete_weights(folder)
    fresh = load_policy(tmp_path / "model").get_input_embeddings().weight
    assert torch.equal(load_policy(folder).get_input_embeddings().weight[:46], fresh)


def test_a_folder_without_safetensors_cannot_be_resized(tmp_path):
    path = make_model(tmp_path / "model")
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.resize_embeddings"):
        complete_weights(changed_folder(str(path), {}, 64))


def test_a_reward_model_is_resized_too(tmp_path):
    path = make_model(tmp_path / "model")
    load_scorer(path, new_head=True).save_pretrained(tmp_path / "scorer")
    folder = changed_folder(str(tmp_path / "scorer"), {}, 64)
    complete_weights(folder)
    assert load_scorer(folder).get_input_embeddings().weight.shape == (64, 32)


def test_the_remedy_for_a_larger_tokenizer_works(tmp_path):
    path = make_model(tmp_path / "model", vocab_size=45)
    tokenizer = make_tokenizer(tmp_path / "other")
    with pytest.raises(ModelError) as wrong:
        check_reader(path, tokenizer, field="actor_rollout_ref.model.tokenizer_path")
    key, _, rows = wrong.value.remedy.split()[1].partition("=")
    assert (key, rows) == ("actor_rollout_ref.model.resize_embeddings", "64")
    check_reader(changed_folder(str(path), {}, int(rows)), tokenizer, field="")


CARDS = [
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}},
    {"max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 4.0}},
]


def on_rank(path):
    """Make the folder on this rank; return the weights, and log-probs in float64."""
    folder = changed_folder(path, CARDS[0], 64)
    complete_weights(folder)
    engine = make_engine(folder, frozen=True)
    return weights(engine), output(engine, DataProto({"tokens": make_batch().ragged("tokens")})).values


@pytest.mark.slow
def test_two_ranks_read_the_same_model(tmp_path):
    path = str(make_model(tmp_path / "model", max_position_embeddings=32))
    for found, log_probs in on_ranks(on_rank, path):
        alone, wanted = on_rank(path)
        assert all(torch.equal(found[name], value) for name, value in alone.items())
        assert torch.allclose(log_probs, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("card", CARDS)
def test_yarn_beyond_the_original_positions_is_that_of_transformers(tmp_path, card):
    path = make_model(tmp_path / "model", max_position_embeddings=32)
    config = load_config(path)
    config.max_position_embeddings = card.get("max_position_embeddings", 32)
    config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0}
    config.rope_parameters["original_max_position_embeddings"] = config.max_position_embeddings
    batch = DataProto({"tokens": Ragged.from_list([torch.randint(46, (120,)), torch.randint(46, (90,))])})
    found, unchanged = (
        output(make_engine(folder, frozen=True), batch)
        for folder in (changed_folder(str(path), card, None), path)
    )
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float64)
    for tokens, log_probs, others in zip(batch.ragged("tokens"), found, unchanged, strict=True):
        with torch.no_grad():
            wanted = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted = wanted.gather(-1, tokens[1:, None])[:, 0]
        assert torch.allclose(log_probs[1:], wanted, rtol=1e-10, atol=1e-10)
        assert (others[1:] - wanted).abs().max() > 1e-3
