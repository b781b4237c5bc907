"""Write a small language model, and preferences to train a reward model on.

Of two ratings, the rating with more stars is preferred: "**.*" wins over "..*...", whatever their lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.demo.model import write_model

FOLDER = Path("preferences")


def write(folder: Path = FOLDER, *, seed: int = 0) -> None:
    """Write model/, train.parquet (prompt, chosen, rejected) and val.parquet with other ratings."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", seed=seed)
    draw = np.random.default_rng(seed)
    rows = [preference(draw) for _ in range(4000)]
    held_out, train = rows[:256], rows[256:]
    known = {(row["chosen"], row["rejected"]) for row in held_out}
    train = [row for row in train if (row["chosen"], row["rejected"]) not in known]
    pq.write_table(pa.Table.from_pylist(train), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(held_out), folder / "val.parquet")


def preference(draw: np.random.Generator) -> dict[str, Any]:
    first = second = ""
    while first.count("*") == second.count("*"):
        first, second = ("".join(draw.choice([".", "*"], size=draw.integers(3, 11))) for _ in range(2))
    better, worse = sorted((first, second), key=lambda text: -text.count("*"))
    return {"prompt": f"film {draw.integers(100)}: ", "chosen": better, "rejected": worse}


if __name__ == "__main__":
    write()
    print(f"wrote {FOLDER}")
