import torch

from tandem.config.rewards import RewardConfig
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.workers.reward import RewardWorker, at_last_token
from tests.support.tiny import make_tokenizer


def test_a_score_stands_at_the_last_response_token():
    mask = Ragged.from_list([[False, True, True, False], [False, False], [False, True]], torch.bool)
    placed = at_last_token(torch.tensor([5.0, 6.0, 7.0]), mask)
    assert [row.tolist() for row in placed] == [[0, 0, 5, 0], [0, 0], [0, 7]]


def test_responses_are_decoded_without_prompt_and_special_tokens_and_scored(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in ("1+2=3<eos>", "2+2=5")]
    masks = [[False] * 4 + [True] * 2, [False] * 4 + [True]]
    batch = DataProto(
        {"tokens": Ragged.from_list(rows), "response_mask": Ragged.from_list(masks, torch.bool)},
        {
            "data_source": ["arithmetic"] * 2,
            "ground_truth": ["3", "4"],
            "extra_info": [{}, {}],
            "index": [0, 1],
            "uid": ["a", "b"],
        },
    )
    worker = RewardWorker(tokenizer, None, RewardConfig(), RunFolder(tmp_path / "run"))
    out = worker.compute_scores(batch)
    assert out.dense("scores").tolist() == [1.0, 0.0]
    assert list(out.non_tensor_batch["response_text"]) == ["3", "5"]
    assert list(out.non_tensor_batch["reward_why"]) == ["answer 3, expected 3", "answer 5, expected 4"]
    assert out.ragged("token_level_scores").row(0).tolist() == [0, 0, 0, 0, 0, 1.0]
    nothing = worker.compute_scores(batch[:0])
    assert len(nothing) == 0
    assert nothing.columns == out.columns
    assert worker.take_timings()["timing/reward"] > 0
