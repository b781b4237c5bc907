"""Find the local files and folders of models and datasets that a config names by their names on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tandem import hub
from tandem.config.data_files import files_of
from tandem.config.needs import ModelFolder, files
from tandem.config.schema import keys
from tandem.config.section import Section
from tandem.errors import ConfigError


def snapshots(root: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict from key to local files or folders, for given hub names, folders and patterns.

    Keys whose files are not available are left out.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        needs = keys(root)[name].needs
        if any(isinstance(need, ModelFolder) for need in needs) and isinstance(value, str):
            found |= {name: hub.find(value).folder} if hub.is_name(value) else {}
        listed = [value] if isinstance(value, str) else value
        if files in needs and isinstance(listed, list):
            with suppress(ConfigError):  # the key's own rule reports it
                there = [path for file in listed for path in files_of(str(file))]
                found |= {} if there == listed else {name: there}
    return {name: place for name, place in found.items() if place is not None} | _named_by_terms(given)


def _named_by_terms(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict from key to local model folders, for the keys that name several models."""
    found: dict[str, Any] = {}
    for name in ("actor_rollout_ref.ref.models", "reward_model.models"):
        terms = given.get(name)
        for label, term in terms.items() if isinstance(terms, Mapping) else ():
            path = term.get("path") if isinstance(term, Mapping) else None
            folder = hub.find(path).folder if isinstance(path, str) and hub.is_name(path) else None
            if folder is not None:
                found[name] = {**found.get(name, given[name]), label: {**term, "path": folder}}
    return found
