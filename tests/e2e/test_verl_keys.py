"""The keys that are tested one by one are all keys of the document's command line."""

from __future__ import annotations

from tests.e2e import test_verl_keys_learning, test_verl_keys_running
from tests.e2e.keys import TRIED
from tests.e2e.shop import DOCUMENT

FILL_TRIED = (test_verl_keys_learning, test_verl_keys_running)


def test_every_key_of_the_command_line_has_been_tried() -> None:
    assert set(DOCUMENT) == TRIED
