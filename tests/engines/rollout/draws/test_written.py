import numpy as np
import pytest

from tandem.engines.rollout.draws.written import Written
from tandem.protocol import Request, SamplingParams


def decode(token_ids):
    return "".join(chr(token) for token in token_ids)


def written(text, params):
    out = Written(Request("r", 2, np.array([1]), params))
    out.token_ids += map(ord, text)
    out.log_probs += [-float(at) for at in range(len(text))]
    out.versions += [7] * len(text)
    return out


@pytest.mark.parametrize(
    ("text", "new", "min_tokens", "left"),
    [
        ("abcdef", 6, 0, "abcd"),  # of "cd" and "e", "cd" ends first
        ("abcdef", 2, 0, "abcde"),  # the earlier tokens were searched before
        ("abcdef", 6, 4, "abcde"),
        ("abxyzf", 6, 0, None),
    ],
)
def test_what_follows_the_first_new_stop_string_is_dropped(text, new, min_tokens, left):
    params = SamplingParams(max_tokens=9, stop=("cd", "e"), min_tokens=min_tokens)
    out = written(text, params)
    assert out.cut_at_stop(new, decode) == (left is not None)
    sample = out.sample("stop")
    assert decode(sample.token_ids.tolist()) == (left or text)
    assert len(sample.log_probs) == len(sample.versions) == len(left or text)
    assert not written(text, params).cut_at_stop(new, None)
    assert not written(text, SamplingParams(max_tokens=9)).cut_at_stop(new, decode)


def test_untruncated_log_probs_are_given_where_they_are_known():
    plain, cut = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, top_k=3)
    sample = written("abc", plain).sample("length")
    assert sample.untruncated_log_probs.tolist() == sample.log_probs.tolist() == [0.0, -1.0, -2.0]
    assert written("abc", plain).sample("length", processed=False).untruncated_log_probs is None
    assert written("abc", cut).sample("length").untruncated_log_probs is None
    told = written("abc", cut)
    told.untruncated += [-1.0, -2.0, -3.0]
    assert told.sample("length").untruncated_log_probs.tolist() == [-1.0, -2.0, -3.0]
