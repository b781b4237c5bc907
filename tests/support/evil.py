"""Files that run a command when they are unpickled or imported; the command leaves a file behind."""

import builtins
import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.checkpoint import manager


class Runs:
    """An object that calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def payloads(canary: Path) -> dict[str, Any]:
    """Return objects, by kind, that create `canary` if they are unpickled without restrictions."""
    command = f"touch {canary}"
    array = np.empty(1, dtype=object)
    array[0] = Runs(os.system, command)
    return {
        "system": Runs(os.system, command),
        "popen": Runs(subprocess.Popen, ["touch", str(canary)]),
        "exec": Runs(builtins.exec, f"open({str(canary)!r}, 'w')"),
        "eval": Runs(eval, f"open({str(canary)!r}, 'w')"),
        "import": Runs(builtins.__import__, "antigravity"),
        "open": Runs(open, str(canary), "w"),
        "torch": Runs(torch.save, 1, str(canary)),
        "numpy": Runs(np.save, str(canary), 1),
        "nested": {"loader": [({"x": Runs(os.system, command)},)]},
        "array": {"array": array},
        "getattr": Runs(getattr, Runs(builtins.__import__, "os"), "system"),
        "pickle": Runs(pickle.loads, pickle.dumps(Runs(os.system, command))),
    }


def put_state(checkpoint: Path, state: Any) -> None:
    torch.save(state, checkpoint / "state.pt")
    seal(checkpoint)


def seal(checkpoint: Path) -> None:
    """Update a checkpoint's digests to those of its current files."""
    file = checkpoint / "manifest.json"
    content = json.loads(file.read_text())
    file.unlink()
    manager._write_manifest(checkpoint, content["step"], {})


def put_contents(shards: Path, thing: Any) -> None:
    (shards / ".metadata").write_bytes(pickle.dumps(thing))
    seal(shards.parent)


def put_data(shards: Path, thing: Any) -> None:
    """Replace every entry of a sharded checkpoint's files with a pickle."""
    contents = pickle.loads((shards / ".metadata").read_bytes())
    with (shards / "evil.distcp").open("wb") as file:
        torch.save(thing, file)
        length = file.tell()
    for place in contents.storage_data.values():
        place.relative_path, place.offset, place.length = "evil.distcp", 0, length
    put_contents(shards, contents)
