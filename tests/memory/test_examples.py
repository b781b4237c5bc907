"""The configs of examples/memory fit the devices in their names, as docs/memory.md says."""

from pathlib import Path

import pytest

from docs.memory_table import EXAMPLES, beside_theirs, examples, planned, savings

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_config_fits(file):
    _, _, made = planned(file)
    assert made.fits and made.margin > 0.05 * made.device


@pytest.mark.parametrize("rows", [examples, savings, beside_theirs])
def test_the_page_has_the_table(rows):
    assert "\n".join(rows()) in PAGE.read_text()
