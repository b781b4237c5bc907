import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engines.rollout.draws.stops import ends_with_stop

PIECES = [bytes([byte]) for byte in "aé€😀".encode()] + [b"ab", b"ba", b"a" * 9, b"\n\n", b"", b"</", b"END"]
IDS = {piece: i for i, piece in enumerate(PIECES)}


def decode(token_ids):
    return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


def tokens_of(*pieces):
    return np.array([IDS[piece] for piece in pieces])


def ends(tokens, stop, min_tokens=0, ended=lambda *args: ends_with_stop(*args[:2], decode, args[2])):
    """Return the number of tokens after which the response ends, or None if it does not end."""
    sizes = range(min_tokens + 1, len(tokens) + 1)
    return next((size for size in sizes if ended(tokens[:size], stop, min_tokens)), None)


def ended_by_definition(tokens, stop, min_tokens):
    """Return whether the last token adds a stop string to the whole text."""
    now, before = decode(tokens), decode(tokens[:-1])
    return any(count(now, text) > count(before, text) for text in stop)


def count(text, part):
    return sum(text.startswith(part, i) for i in range(len(text)))


@pytest.mark.parametrize(("pieces", "stop", "end"), [
    ([b"a", b"</", b"END", b"a"], ("</END",), 3), ([b"a", b"</", b"END"], ("/E",), 3), ([b"END"], ("N",), 1),
    ([b"ab", b"ab"], ("bab", "never"), 2), ([bytes([b]) for b in "€".encode()] + [b"a"], ("€",), 3),
    ([b"a"] + [bytes([b]) for b in "😀é".encode()], ("😀é",), 7), ([b"a", b"", b"", b"ba"], ("ab",), 4),
    ([b"\n\n"], ("\n",), 1), ([b"a", b"ba", b"END"], ("D!",), None), ([b"a"] * 40, ("aaa" * 13,), 39),
    ([b"a" * 9] * 30 + [b"</", b"END"], ("</END",), 32),
])  # fmt: skip
def test_the_token_that_completes_a_string_ends_the_response(pieces, stop, end):
    assert ends(tokens_of(*pieces), stop) == end


def test_strings_that_end_among_the_first_min_tokens_do_not_count():
    tokens = tokens_of(*[b"a", b"END"] * 3, b"a")
    for stop in (("END",), ("aE", "no")):
        assert [ends(tokens, stop, n) for n in range(8)] == [2, 2, 4, 4, 6, 6, None, None]


def test_the_decoded_window_does_not_grow_with_the_response():
    seen = []

    def watched(token_ids):
        seen.append(len(token_ids))
        return decode(token_ids)

    tokens = tokens_of(*[b"a"] * 500)
    assert not any(ends_with_stop(tokens[:n], ("END", "€"), watched, 3) for n in range(4, 501))
    assert max(seen) <= 12 and len(seen) == 497


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.sampled_from(range(len(PIECES))), min_size=1, max_size=30),
    stop=st.lists(
        st.sampled_from(["a", "aa", "ab", "ba\n", "é", "€a", "😀", "END", "</E", "aé"]), min_size=1
    ),
    min_tokens=st.integers(0, 12),
)
def test_random_responses_end_where_the_whole_text_says(tokens, stop, min_tokens):
    asked = np.array(tokens), tuple(stop), min_tokens
    assert ends(*asked) == ends(*asked, ended_by_definition)
