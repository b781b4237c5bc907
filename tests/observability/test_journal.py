import pytest

from tandem.errors import ConfigError, DataError
from tandem.observability.journal import Journal


def test_entries_come_back_and_a_torn_one_does_not(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"n": 2})
    assert journal.entries == [] and not path.exists()
    journal.append([{"row": 0}, {"row": 1}])
    journal.append([])
    journal.append(iter([{"row": 2, "x": 0.1}]))
    with path.open("a") as file:
        file.write('{"row": 3, "x')
    again = Journal(path, {"n": 2})
    assert again.entries == [{"row": 0}, {"row": 1}, {"row": 2, "x": 0.1}]
    again.append([{"row": 3}])
    assert Journal(path, {"n": 2}).entries[3:] == [{"row": 3}]
    again.remove()
    again.remove()
    assert not path.exists()


def test_other_settings_are_named_and_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, {"n": 2, "model": ["a", 1]}).append([{"row": 0}])
    assert Journal(path, {"model": ("a", 1), "n": 2}).entries == [{"row": 0}]
    with pytest.raises(ConfigError) as caught:
        Journal(path, {"n": 4, "model": ["a", 1]})
    assert (caught.value.got, caught.value.expected) == ("n=4", "n=2")
    assert "finished parts: 1" in str(caught.value)
    assert Journal(path, {"n": 4}, overwrite=True).entries == []
    assert not path.exists()


def test_a_file_of_something_else_is_refused_and_a_torn_first_line_is_no_journal_yet(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("a song\n")
    with pytest.raises(DataError, match="not a journal"):
        Journal(path, {})
    path.write_text('{"settings"')
    Journal(path, {"n": 1}).append([{"row": 0}])
    assert Journal(path, {"n": 1}).entries == [{"row": 0}]
