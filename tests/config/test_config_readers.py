"""No key is dead: each is read outside the rules, and the modules said to act on it exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import tandem.config
from tandem.config import EvalConfig, GenerateConfig, RMConfig, SFTConfig, TrainConfig
from tandem.config.schema import keys

PACKAGE = Path(tandem.config.__file__).parent.parent
ROOTS = (TrainConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig)
ALL_KEYS = [key for root in ROOTS for key in keys(root).values()]

REFUSED = {"strategy"}  # one allowed value in this build, which the rules see to


@cache
def attributes_read() -> frozenset[str]:
    """Names read as attributes anywhere but in the rules and the sizes."""
    names = ("check.py", "check_offline.py", "check_supervised.py", "files.py", "placement.py", "sizes.py")
    names += (
        "check_correction.py",
        "check_sampling.py",
        "pairs.py",
        "unused.py",
        "unused_optim.py",
        "use.py",
    )
    rules = {PACKAGE / "config" / name for name in names}
    return frozenset(
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path not in rules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: key.name)
def test_modules_that_read_a_key_exist(key):
    for module in key.read_by:
        path = PACKAGE.parent.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: key.name)
def test_key_is_read(key):
    leaf = key.name.rsplit(".", 1)[-1]
    has_heirs = any(other.inherits == key.name for other in ALL_KEYS)
    assert has_heirs or (leaf in attributes_read()) != (leaf in REFUSED)
