import torch

from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.workers.samples import requests_of


def test_a_response_ends_where_the_longest_sequence_does():
    prompts = Ragged.from_lengths(torch.arange(9), [2, 7])
    table = DataProto({"prompts": prompts}, {"uid": ["short", "long"]})
    params = SamplingParams(max_tokens=6, min_tokens=4)
    requests = requests_of(table, 2, params, longest=10)
    assert [(request.uid, request.sample) for request in requests] == [
        ("short", 0),
        ("short", 1),
        ("long", 0),
        ("long", 1),
    ]
    assert [request.params.max_tokens for request in requests] == [6, 6, 3, 3]
    assert [request.params.min_tokens for request in requests] == [4, 4, 3, 3]
    assert requests[0].params is params
