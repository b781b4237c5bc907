import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.packing import Packing, pack
from tandem.protocol import Ragged

CPU = torch.device("cpu")
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(lengths)
@settings(max_examples=100, deadline=None)
def test_every_token_has_its_place_in_a_rectangle(rows):
    plan = Packing(rows, CPU)
    assert plan.position_ids.tolist() == [t for length in rows for t in range(length)]
    assert plan.cu_seqlens.tolist() == [sum(rows[:i]) for i in range(len(rows) + 1)]
    assert plan.max_length == max(rows)
    assert sum(n for n, _ in plan.rectangles) == len(rows)
    assert plan.padded_tokens == sum(n * width for n, width in plan.rectangles)
    places = torch.arange(sum(rows)) if plan.places is None else plan.places
    # Each sequence starts at the start of a row of a rectangle that is wide enough.
    starts, begin, taken = {}, 0, set()
    for n, width in plan.rectangles:
        starts.update({begin + i * width: width for i in range(n)})
        begin += n * width
    for run in places.split(rows):
        first = int(run[0])
        assert run.tolist() == list(range(first, first + len(run)))
        assert starts[first] >= len(run) and first not in taken
        taken.add(first)


def test_padding_stays_small_and_equal_lengths_need_no_copy():
    plan = Packing([7, 7, 7], CPU)
    assert plan.places is None and plan.rectangles == ((3, 7),)
    plan = Packing(list(range(4, 65)), CPU)
    assert plan.padded_tokens <= 1.2 * sum(range(4, 65)) and len(plan.rectangles) <= 8


@pytest.mark.parametrize("pad_to_longest", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@given(lengths, st.randoms())
@settings(max_examples=60, deadline=None)
def test_sources_predict_targets(whole, pad_to_longest, rows, draw):
    """A token is predicted at the token before it; whole sequences are judged at their last token."""
    total = sum(rows)
    tokens = Ragged.from_lengths(torch.arange(100, 100 + total), rows)
    wanted = torch.tensor([draw.random() < 0.6 for _ in range(total)])
    inputs = pack(tokens, None if whole else wanted, device=CPU, pad_to_longest=pad_to_longest, whole=whole)
    first, positions = set(tokens.offsets[:-1].tolist()), tokens.positions().tolist()
    if whole:
        places = sources = [int(end) - 1 for end in tokens.offsets[1:]]
        sizes = rows
    else:
        places = [t for t in range(total) if wanted[t] and t not in first]
        sources, sizes = [t - 1 for t in places], [max(n - 1, 1) for n in rows]
        assert inputs.targets.tolist() == [100 + t for t in places]
    assert inputs.places.tolist() == places and inputs.total == total
    assert inputs.input_ids[inputs.sources].tolist() == [100 + t for t in sources]
    assert inputs.packing.position_ids[inputs.sources].tolist() == [positions[t] for t in sources]
    sizes = [max(sizes)] * len(rows) if pad_to_longest else sizes
    assert inputs.packing.cu_seqlens.diff().tolist() == sizes
    assert len(inputs.input_ids) == sum(sizes)


def test_without_a_mask_all_but_first_tokens_are_predicted():
    tokens = Ragged.from_list([[5, 6, 7], [8], [9, 4]])
    assert pack(tokens, None, device=CPU).targets.tolist() == [6, 7, 4]


@pytest.mark.parametrize("whole", [False, True])
def test_filling_adds_sequences_of_which_nothing_is_asked(whole):
    tokens = Ragged.from_list([[5, 6, 7], [8], [9, 10]])
    plain = pack(tokens, None, device=CPU, whole=whole)
    filled = pack(tokens, None, device=CPU, whole=whole, fill=300)
    own = len(plain.input_ids)
    assert filled.input_ids.tolist() == plain.input_ids.tolist() + [0] * (300 - own)
    for name in ("sources", "targets", "places"):
        assert torch.equal(getattr(filled, name), getattr(plain, name))
    lengths = filled.packing.cu_seqlens.diff().tolist()
    assert lengths[:3] == plain.packing.cu_seqlens.diff().tolist()
    assert lengths[3:] == [128, 128, 300 - own - 256]
    less = pack(tokens, None, device=CPU, whole=whole, fill=own - 1)
    assert torch.equal(less.input_ids, plain.input_ids)
