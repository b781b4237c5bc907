"""Tests that the pages list all settings of other systems and all variables that verl reads."""

import re
from pathlib import Path

import pytest

from docs import migrate_pages
from tandem.migrate import environment, openrlhf, trl_table

VERL = next((Path(__file__).parents[2] / ".peers" / "verl" / "lib").glob("python3*/site-packages/verl"), None)
READ = re.compile(r"(?:environ(?:\.get)?[\[(]|getenv\()\s*[\"']([A-Z][A-Z_0-9]+)[\"']")


def test_every_setting_has_a_line():
    page = migrate_pages.from_trl()
    for table in trl_table.TABLES.values():
        assert all(f"| `{name}` |" in page for name in table)
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(line.count(" | ") == 2 and not line.endswith("|  |") for line in lines)
    page = migrate_pages.from_openrlhf()
    assert all(f"| `{name}` |" in page for name in openrlhf.TABLE)
    page = migrate_pages.verl_environment()
    assert all(f"| `{name}` |" in page for name in environment.VARIABLES)


@pytest.mark.verl
@pytest.mark.skipif(VERL is None, reason="verl is not installed; run make peers")
def test_every_variable_that_verl_reads_has_a_line():
    assert VERL is not None
    found = {name for path in VERL.rglob("*.py") for name in READ.findall(path.read_text(errors="replace"))}
    assert found - environment.VARIABLES.keys() == set()
