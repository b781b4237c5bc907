"""When keys of pipeline stages count."""

from __future__ import annotations

from typing import Any

from tandem.config.schema import value_at
from tandem.config.use import Use


def schedule(section: str, *, trains: bool = True) -> Use[Any]:
    """When the order of passes counts, for the model whose section lies at that path.

    Args:
        trains: whether it is trained; else there are forward passes alone.
    """
    size = f"{section}fsdp_config.pipeline_parallel_size"
    return Use(
        (f"{section}fsdp_config.pipeline_schedule",),
        (size,),
        lambda config: trains and value_at(config, size) > 1,
        f"with {size}=2 or more" if trains else "for a model that is trained",
    )
