import re

import pytest

import tandem
from tandem.errors import ConfigError
from tests.support.tiny import make_model

ROWS = [{"prompt": "1+1="}, {"prompt": "1" * 20}]


def right(prompt, response):
    return float("2" in response)


def run(folder, response, rows=ROWS, val=None, **changes):
    model = make_model(folder / "model", max_position_embeddings=24, **changes)
    config = {"data.max_response_length": response, "actor_rollout_ref.rollout.n": 2, "trainer.logger": []}
    return tandem.train(model, train=rows, val=val, rewards=right, steps=1, out=folder / "run", config=config)


@pytest.mark.slow
def test_data_that_fit_exactly_run(tmp_path):
    assert run(tmp_path, 4).state == "finished"  # data.max_prompt_length keeps its default of 512


@pytest.mark.parametrize("held_out", [False, True])
def test_one_token_more_is_refused_with_both_keys_and_the_sum(tmp_path, held_out):
    with pytest.raises(ConfigError, match=re.escape("20 (of at most 512) + 5 = 25")) as caught:
        run(tmp_path, 5, *((ROWS[:1], ROWS) if held_out else (ROWS,)))
    told = str(caught.value)
    assert "data.max_prompt_length + data.max_response_length" in told
    assert "max_position_embeddings = 24" in told
    assert not list((tmp_path / "run").glob("checkpoints/*"))
