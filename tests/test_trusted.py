import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem import trusted
from tandem.config.rewards import CustomRewardConfig
from tandem.errors import ConfigError
from tandem.loading import load_function, write_function
from tandem.rewards import own_reward
from tests.support.evil import payloads

Forget = Callable[[], None]


@pytest.fixture(autouse=True)
def forget(tmp_path, monkeypatch):
    """Act as another process of the same user, who exists only in this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(trusted.TRUST, "")
    return lambda: monkeypatch.setenv(trusted.TRUST, "")


def twice(value: int) -> int:
    return 2 * value


def test_a_function_of_ones_own_run_is_loaded_wherever_it_lies(tmp_path, forget):
    path, name = write_function(twice, tmp_path / "run" / "inputs")
    forget()
    assert load_function(f"{path}:{name}")(4) == 8
    forget()
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    assert load_function(f"{tmp_path / 'elsewhere' / 'inputs' / path.name}:{name}")(4) == 8


def test_the_key_is_its_users_alone(tmp_path):
    write_function(twice, tmp_path / "inputs")
    file = tmp_path / "state" / "tandem" / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(file.read_bytes()) == 32
    key = file.read_bytes()
    write_function(twice, tmp_path / "more")
    assert file.read_bytes() == key


def test_a_function_of_another_user_is_not_loaded(tmp_path, forget, monkeypatch):
    path, name = write_function(twice, tmp_path / "inputs")
    forget()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    for _ in range(2):  # also after this user has a key
        with pytest.raises(ConfigError) as caught:
            load_function(f"{path}:{name}")
        assert caught.value.field == str(path) and trusted.TRUST in str(caught.value.remedy)
        write_function(twice, tmp_path / "own")
    monkeypatch.setenv(trusted.TRUST, f"{tmp_path / 'own'}{os.pathsep}{path.parent}")
    assert load_function(f"{path}:{name}")(4) == 8


@pytest.mark.parametrize("kind", payloads(Path("canary")))
def test_an_evil_pickle_in_place_of_a_function_is_not_read(kind, tmp_path, forget):
    canary, (path, name) = tmp_path / "canary", write_function(twice, tmp_path / "inputs")
    forget()
    path.write_bytes(pickle.dumps(payloads(canary)[kind]))  # next to the signature of the old content
    with pytest.raises(ConfigError) as caught:
        load_function(f"{path}:{name}")
    assert caught.value.field == str(path)
    with pytest.raises(ConfigError):
        own_reward(CustomRewardConfig(path=str(path), name=name))
    assert not list(tmp_path.glob("canary*"))


def test_without_a_place_for_the_key_the_process_itself_may_go_on(tmp_path, forget, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    path, name = write_function(twice, tmp_path / "inputs")
    assert load_function(f"{path}:{name}")(4) == 8
    forget()
    other = path.with_name("other.pkl")
    shutil.copy(path, other)
    with pytest.raises(ConfigError):
        load_function(f"{other}:{name}")


def test_a_link_out_of_a_trusted_folder_is_not_followed(tmp_path, forget, monkeypatch):
    path, name = write_function(twice, tmp_path / "inputs")
    path.with_name(path.name + ".sig").unlink()
    (tmp_path / "trusted").mkdir()
    link = tmp_path / "trusted" / "link.pkl"
    link.symlink_to(path)
    monkeypatch.setenv(trusted.TRUST, str(tmp_path / "trusted"))
    with pytest.raises(ConfigError):
        load_function(f"{link}:{name}")
