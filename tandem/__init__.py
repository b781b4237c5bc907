"""Reinforcement learning for language models, from a laptop to a cluster, with one program.

    import tandem
    run = tandem.train("path/to/model", train=rows, rewards=[right], steps=100, out="runs/mine")

The names in `__all__` are loaded when they are first used, so `import tandem` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.api.runs import Run, evaluate, generate, open
    from tandem.api.training import Trainer, reward_model, sft, train

_PLACES = {
    **dict.fromkeys(("Run", "evaluate", "generate", "open"), "tandem.api.runs"),
    **dict.fromkeys(("Trainer", "reward_model", "sft", "train"), "tandem.api.training"),
}

__all__ = ["Run", "Trainer", "evaluate", "generate", "open", "reward_model", "sft", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
