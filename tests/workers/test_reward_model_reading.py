from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen2Config,
)

from tandem.config.rewards import RewardConfig
from tandem.errors import ModelError
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.rewards.steps import step_ends, steps_of_ids
from tandem.runtime import LocalBackend, ResourcePool, WorkerGroup
from tandem.runtime.worker import create
from tandem.workers.reward import RewardWorker, at_last_token
from tests.support.scorers import make_other_tokenizer, make_scorer
from tests.support.tiny import make_tokenizer
from tests.workers import roles

TEXTS = [("1+2=", "ab.12"), ("12+30=", "4."), ("what?", ""), ("so", "a..b.  c")]
OTHER = "{{a: {{path: {folder}/same, tokenizer_path: {folder}/own}}}}"
PROMPTS = [[{"role": "user", "content": prompt}] for prompt, _ in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = roles.make_folder(tmp_path_factory.mktemp("models"))
    make_scorer(folder / "same", folder / "model")
    make_other_tokenizer(folder / "own")
    return folder


@pytest.fixture(scope="module")
def policys(folder):
    return make_tokenizer(folder / "policys")


@pytest.fixture(scope="module")
def own(folder):
    return AutoTokenizer.from_pretrained(folder / "own")


@pytest.fixture
def batch(policys):
    rows = [
        [policys.encode(text, add_special_tokens=False) for text in (prompt, answer + "<eos>" * bool(answer))]
        for prompt, answer in TEXTS
    ]
    tokens = Ragged.from_list([prompt + answer for prompt, answer in rows], torch.int64)
    marks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in rows]
    columns = {"tokens": tokens, "response_mask": Ragged.from_list(marks, torch.bool)}
    return DataProto(columns, {"messages": PROMPTS})


@pytest.fixture
def worker_of(folder, policys):
    def made(models: str, role: str = "a") -> Any:
        words = ("data.max_response_length=10", "reward_model.forward_micro_batch_size_per_gpu=2")
        config = roles.make_config(folder, f"reward_model.models={models}", *words)
        factory = roles.scorer_factory(config, tokenizer=policys, role=f"reward_model.{role}")
        return create(factory, 0, 1)

    return made


def head_outputs(path, rows, kind=AutoModelForSequenceClassification):
    """Return the head's outputs at every token, each row alone, computed with transformers."""
    model: Any = kind.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        return [model.score(model.model(torch.tensor([row])).last_hidden_state)[0] for row in rows]


def test_another_tokenizer_reads_the_conversation_anew_from_text(worker_of, folder, own, batch, capsys):
    out = worker_of(OTHER.format(folder=folder)).compute_rm_score(batch)
    rows = []
    for messages, (_, answer) in zip(PROMPTS, TEXTS, strict=True):
        text = own.apply_chat_template([*messages, {"role": "assistant", "content": answer}], tokenize=False)
        assert text.endswith("<end>?")
        rows.append(own.encode(text.removesuffix("?"), add_special_tokens=False))  # like `tandem rm`
    wanted = torch.stack([scores[-1, 0] for scores in head_outputs(folder / "same", rows)]).float()
    assert torch.allclose(out.dense("scores"), wanted, atol=1e-6)
    last = [float(row[-1]) for row in out.ragged("token_level_scores")]
    assert [last[i] for i in (0, 1, 3)] == pytest.approx([float(wanted[i]) for i in (0, 1, 3)], abs=1e-6)
    assert last[2] == 0  # a response without tokens
    assert not out.dense("reward_failed").any()
    assert "formatted again" in capsys.readouterr().out


def test_a_prompt_that_is_text_gets_no_template_and_an_end(worker_of, folder, own, batch):
    batch.non_tensor_batch["messages"][0] = [{"role": "", "content": "1+2="}]
    batch.non_tensor_batch["messages"][1] = []  # as if the prompt were token ids
    out = worker_of(OTHER.format(folder=folder)).compute_rm_score(batch)
    rows = [[*own.encode(text, add_special_tokens=False), 1] for text in ("1+2=ab.12", "12+30=4.")]
    wanted = [float(scores[-1, 0]) for scores in head_outputs(folder / "same", rows)]
    assert out.dense("scores")[:2].tolist() == pytest.approx(wanted, abs=1e-6)


def test_another_template_alone_is_reason_enough(worker_of, folder, batch):
    same = f"path: {folder / 'same'}"
    models = f"{{a: {{{same}, custom_chat_template: '{{{{ messages[0].content }}}}z'}}, b: {{{same}}}, "
    models += f"c: {{{same}, tokenizer_path: {folder / 'own'}}}}}"
    assert worker_of(models, role="b").reader.own is None
    assert worker_of(models, role="c").reader.own.eos_token == "<end>"
    out = worker_of(models, role="a").compute_rm_score(batch)
    assert out.dense("reward_failed").all()  # the template has no assistant turn
    assert "omits the response" in out.non_tensor_batch["reward_why"][0]
    assert not out.dense("scores").any()


def test_what_is_longer_than_its_positions_is_not_read(worker_of, folder, own, batch):
    make_scorer(folder / "short", folder / "model", max_position_embeddings=9)
    same = worker_of(f"{{a: {{path: {folder / 'same'}}}}}").compute_rm_score(batch)
    out = worker_of(f"{{a: {{path: {folder / 'short'}}}}}").compute_rm_score(batch)
    lengths = batch.ragged("tokens").lengths
    assert out.dense("reward_failed").tolist() == (lengths > 9).tolist() == [True, False, False, True]
    assert out.non_tensor_batch["reward_why"][0] == f"{int(lengths[0])} tokens, but at most 9 are allowed"
    kept = ~out.dense("reward_failed")
    assert torch.equal(out.dense("scores")[kept], same.dense("scores")[kept])
    assert out.dense("scores")[~kept].tolist() == [0.0, 0.0]
    assert len(out.ragged("token_level_scores").values) == len(batch.ragged("tokens").values)


@pytest.mark.parametrize(("step_score", "total"), [("sum", sum), ("min", min), ("last", lambda s: s[-1])])
def test_steps_are_scored_where_they_end(worker_of, folder, own, batch, step_score, total):
    """The ends are counted by hand: ab. 12<eos>, 4., nothing, a. b. c<eos>. Blank text is not a step."""
    models = f"{{a: {{path: {folder / 'same'}, step_separator: '.', step_score: {step_score}}}}}"
    out = worker_of(models).compute_rm_score(batch)
    ends = [[4 + 2, 4 + 5], [6 + 1], [], [2 + 1, 2 + 4, 2 + 8]]
    rows = [row.tolist() for row in batch.ragged("tokens")]
    whole = [scores[:, 0].float() for scores in head_outputs(folder / "same", rows)]
    expected = []
    for places, scores, placed in zip(ends, whole, out.ragged("token_level_scores"), strict=True):
        wanted = torch.zeros(len(scores))
        wanted[places] = scores[places]
        assert torch.allclose(placed, wanted, atol=1e-6), places
        expected.append(float(total(scores[places].tolist())) if places else 0.0)
    assert out.dense("scores").tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_token_classifier_over_other_tokens(worker_of, folder, own, batch, labels):
    """Scores are read at the ends of steps in its own tokens, and placed at those in the policy's."""
    path = make_scorer(folder / f"steps {labels}", folder / "model", by_token=True, labels=labels)
    with pytest.raises(ModelError, match="step_separator is missing"):
        worker_of(f"{{a: {{path: '{path}'}}}}")
    models = f"{{a: {{path: '{path}', tokenizer_path: {folder / 'own'}, step_separator: '.'}}}}"
    out = worker_of(models).compute_rm_score(batch)
    texts = ["u.1+2=?a.ab.12<end>", "u.12+30=?a.4.<end>", "u.what??a.<end>", "u.so?a.a..b.  c<end>"]
    pieces = [own.tokenize(text) for text in texts]
    rows = [own.convert_tokens_to_ids(row) for row in pieces]
    assert pieces[0] == ["u", ".", "1", "+", "2", "=", "?", "a", ".", "ab", ".", "12", "<end>"]
    ends = [[10, 12], [11], [], [8, 11, 15]]  # in the model's tokens, counted by hand
    places = [[6, 9], [7], [], [3, 6, 10]]  # in the policy's tokens
    found = head_outputs(path, rows, AutoModelForTokenClassification)
    for row, scores, at, placed in zip(range(4), found, ends, out.ragged("token_level_scores"), strict=True):
        values = scores[:, 0] if labels == 1 else scores.softmax(-1)[:, 1]
        wanted = torch.zeros(len(placed))
        wanted[places[row]] = values[at].float()
        assert torch.allclose(placed, wanted, atol=1e-6), row


def test_ends_of_steps(policys):
    assert step_ends("a\n\nb", "\n\n") == [3, 4]
    assert step_ends("a\n\n\n\nb\n\n", "\n\n") == [3, 8]
    assert step_ends(" \n\n ", "\n\n") == step_ends("", "x") == []
    ids = policys.encode("ab.cd..e", add_special_tokens=False)  # a separator within tokens
    assert (steps_of_ids(policys, ids, ".."), steps_of_ids(policys, ids, ".c")) == ([6, 7], [3, 7])


@pytest.fixture
def answers(folder):
    tokenizer = roles.tokenizer_of(roles.make_config(folder))
    texts = [("1+2=", "3<eos>"), ("12+30=", "42"), ("what?", "")]
    rows = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in texts]
    tokens = Ragged.from_list([prompt + answer for prompt, answer in rows])
    marks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in rows]
    mask = Ragged.from_list(marks, torch.bool)
    return DataProto({"tokens": tokens, "response_mask": mask}, {"uid": ["a", "b", "c"]})


@pytest.mark.parametrize("words", [(), ("reward_model.forward_micro_batch_size_per_gpu=1",)])
def test_scores_are_transformers_own_and_stand_at_the_last_response_token(folder, answers, words):
    worker = roles.make_scorer(roles.make_config(folder, *words))
    out = worker.compute_rm_score(answers)
    load = AutoModelForSequenceClassification.from_pretrained
    model = load(folder / "scorer", dtype=torch.float64, attn_implementation="sdpa")
    wanted = torch.stack([model(ids[None]).logits[0, 0] for ids in answers.ragged("tokens")]).float()
    assert torch.equal(out.dense("scores"), wanted) and wanted.dtype == torch.float32
    placed = [row.tolist() for row in out.ragged("token_level_scores")]
    first, second, _ = wanted.tolist()
    assert placed == [[0, 0, 0, 0, 0, first], [0, 0, 0, 0, 0, 0, 0, second], [0] * 5]
    assert list(out.non_tensor_batch["response_text"]) == ["3", "42", ""]
    assert list(out.non_tensor_batch["reward_extra"]) == [{}, {}, {}]
    empty = worker.compute_rm_score(answers[:0])
    assert len(empty) == 0 and empty.columns == out.columns


def test_a_group_knows_it_by_both_names(folder, answers):
    factory = roles.scorer_factory(roles.make_config(folder))
    group = WorkerGroup(LocalBackend(), factory, ResourcePool([1]), balance=True)
    first, second = group.compute_rm_score(answers).get(), group.compute_scores(answers).get()
    assert roles.equal(first, second)
    assert "timing/reward" in group.take_timings()[0]


def test_a_model_over_too_few_tokens_is_refused(folder, tmp_path):
    config = Qwen2Config.from_pretrained(folder / "model", num_labels=1, vocab_size=20)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="vocabulary"):
        roles.make_scorer(roles.make_config(folder, f"reward_model.model.path={tmp_path}"))


def test_a_score_stands_at_the_last_response_token():
    mask = Ragged.from_list([[False, True, True, False], [False, False], [False, True]], torch.bool)
    placed = at_last_token(torch.tensor([5.0, 6.0, 7.0]), mask)
    assert [row.tolist() for row in placed] == [[0, 0, 5, 0], [0, 0], [0, 7]]


def test_responses_are_decoded_without_prompt_and_special_tokens_and_scored(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in ("1+2=3<eos>", "2+2=5")]
    mask = Ragged.from_list([[False] * 4 + [True] * 2, [False] * 4 + [True]], torch.bool)
    facts = {"data_source": ["arithmetic"] * 2, "ground_truth": ["3", "4"], "extra_info": [{}, {}]}
    facts |= {"index": [0, 1], "uid": ["a", "b"]}
    answers = DataProto({"tokens": Ragged.from_list(rows), "response_mask": mask}, facts)
    worker = RewardWorker(tokenizer, None, RewardConfig(), RunFolder(tmp_path / "run"))
    out = worker.compute_scores(answers)
    assert out.dense("scores").tolist() == [1.0, 0.0]
    assert list(out.non_tensor_batch["response_text"]) == ["3", "5"]
    assert list(out.non_tensor_batch["reward_why"]) == ["answer 3, expected 3", "answer 5, expected 4"]
    assert out.ragged("token_level_scores").row(0).tolist() == [0, 0, 0, 0, 0, 1.0]
    nothing = worker.compute_scores(answers[:0])
    assert len(nothing) == 0 and nothing.columns == out.columns
    assert worker.take_timings()["timing/reward"] > 0
