"""The process whose memory is measured: it runs `tandem export` and prints its peak memory.

Arguments: RUN OUT MAX_SHARD_BYTES
"""

import sys
from pathlib import Path

import torch

from tandem.offline.export import export_checkpoint


def kilobytes(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1])


def main() -> None:
    run, out, max_shard_bytes = sys.argv[1:]
    torch.empty(1)
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
    export_checkpoint(Path(run), Path(out), max_shard_bytes=int(max_shard_bytes))
    print(1024 * (kilobytes("VmHWM") - before))


if __name__ == "__main__":
    main()
