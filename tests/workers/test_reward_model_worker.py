import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config

from tandem.config.rewards import RewardConfig
from tandem.errors import ModelError
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.runtime import LocalBackend, ResourcePool, WorkerGroup
from tandem.workers.reward import RewardWorker, at_last_token
from tests.support.tiny import make_tokenizer
from tests.workers import roles


@pytest.fixture
def batch(folder):
    tokenizer = roles.tokenizer_of(roles.make_config(folder))
    texts = [("1+2=", "3<eos>"), ("12+30=", "42"), ("what?", "")]
    rows = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in texts]
    tokens = Ragged.from_list([prompt + answer for prompt, answer in rows])
    marks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in rows]
    mask = Ragged.from_list(marks, torch.bool)
    return DataProto({"tokens": tokens, "response_mask": mask}, {"uid": ["a", "b", "c"]})


@pytest.mark.parametrize("words", [(), ("reward_model.forward_micro_batch_size_per_gpu=1",)])
def test_scores_are_transformers_own_and_stand_at_the_last_response_token(folder, batch, words):
    worker = roles.make_scorer(roles.make_config(folder, *words))
    out = worker.compute_rm_score(batch)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "scorer", dtype=torch.float64, attn_implementation="sdpa"
    )
    wanted = torch.stack([model(ids[None]).logits[0, 0] for ids in batch.ragged("tokens")]).float()
    assert torch.equal(out.dense("scores"), wanted) and wanted.dtype == torch.float32
    placed = [row.tolist() for row in out.ragged("token_level_scores")]
    first, second, _ = wanted.tolist()
    assert placed == [[0, 0, 0, 0, 0, first], [0, 0, 0, 0, 0, 0, 0, second], [0] * 5]
    assert list(out.non_tensor_batch["response_text"]) == ["3", "42", ""]
    assert list(out.non_tensor_batch["reward_extra"]) == [{}, {}, {}]
    empty = worker.compute_rm_score(batch[:0])
    assert len(empty) == 0 and empty.columns == out.columns


def test_a_group_knows_it_by_both_names(folder, batch):
    factory = roles.scorer_factory(roles.make_config(folder))
    group = WorkerGroup(LocalBackend(), factory, ResourcePool([1]), balance=True)
    first, second = group.compute_rm_score(batch).get(), group.compute_scores(batch).get()
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
    batch = DataProto(
        {"tokens": Ragged.from_list(rows), "response_mask": mask},
        {**facts, "index": [0, 1], "uid": ["a", "b"]},
    )
    worker = RewardWorker(tokenizer, None, RewardConfig(), RunFolder(tmp_path / "run"))
    out = worker.compute_scores(batch)
    assert out.dense("scores").tolist() == [1.0, 0.0]
    assert list(out.non_tensor_batch["response_text"]) == ["3", "5"]
    assert list(out.non_tensor_batch["reward_why"]) == ["answer 3, expected 3", "answer 5, expected 4"]
    assert out.ragged("token_level_scores").row(0).tolist() == [0, 0, 0, 0, 0, 1.0]
    nothing = worker.compute_scores(batch[:0])
    assert len(nothing) == 0 and nothing.columns == out.columns
    assert worker.take_timings()["timing/reward"] > 0
