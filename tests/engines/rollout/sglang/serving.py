from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from tandem.engines.rollout.http.process import ServerProcess
from tandem.engines.rollout.sglang.process import serve


def start(config: PreTrainedConfig, log: Path, **options: Any) -> ServerProcess:
    """Start a real server in fp32 on CPUs. Its environment must have SGLang."""
    sizes = {"max_length": 96, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    kept = {"dtype": torch.float32, "devices": ["cpu"], "gpu_memory_utilization": 0.1}
    return serve(config, log=log, **sizes | kept | options)
