import json

import pytest
import yaml

from tandem.texts import TooLargeError, check_yaml, parse_json, parse_yaml

DEEP = 100_000


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "{", "[1,]", "9" * 5000])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the sentence is of Python's own
        parse_json(text)


def test_brackets_within_a_string_are_no_nesting():
    assert parse_json(json.dumps("[" * DEEP)) == "[" * DEEP


def bomb(levels: int) -> str:
    """Return a text with 10 to the power of `levels` values, by aliases of aliases."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", ["[" * DEEP, "{a: " * DEEP, bomb(9), "&a [*a]", "a: &a\n  b: *a\n"])
def test_yaml_that_would_end_the_process_is_refused(text):
    with pytest.raises(TooLargeError):
        parse_yaml(text)


def test_yaml_with_a_few_aliases_is_read():
    text = "base: &base {lr: 1.0, names: [a, b]}\nother:\n  <<: *base\n  lr: 2.0\n"
    assert parse_yaml(text)["other"] == {"lr": 2.0, "names": ["a", "b"]}
    check_yaml(bomb(4))


def test_what_is_no_yaml_is_yamls_own_error():
    with pytest.raises(yaml.YAMLError):
        check_yaml("a: [1")
