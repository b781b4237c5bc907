"""From a checkpoint of a run to a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf

from tandem.checkpoint.hf_export import export
from tandem.checkpoint.manager import CheckpointManager
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import ModelConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import CheckpointError
from tandem.models.loading import load_config, load_tokenizer


def export_checkpoint(checkpoint: Path, out: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the policy of a checkpoint as a folder that `transformers` loads.

    Args:
        checkpoint: RUN/checkpoints/step_NNNNNN, or RUN for its newest whole checkpoint.
        out: the folder to write; must not exist or be empty.
        dtype: of the written weights.

    Raises:
        CheckpointError: nothing to export there, or a damaged checkpoint.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError("the folder to write is not empty", field=str(out), remedy="name a new folder")
    run = checkpoint if (checkpoint / "config.yaml").is_file() else checkpoint.parent.parent
    manager = CheckpointManager(run / "checkpoints", read_only=True)
    found = manager.latest() if run == checkpoint else manager.open(checkpoint)
    if found is None or not (run / "config.yaml").is_file():
        raise CheckpointError(
            "no checkpoint of a run",
            field=str(checkpoint),
            expected="RUN/checkpoints/step_NNNNNN, or RUN, with RUN/config.yaml",
        )
    model = _model_config(run / "config.yaml")
    engine = FSDPEngine(
        model.path,
        kind="policy",
        model=model,
        fsdp=FSDPConfig(),
        optim=None,
        total_steps=0,
        device=torch.device("cpu"),
    )
    engine.load(found.path / "actor")
    tokenizer = load_tokenizer(
        model.tokenizer_path,
        custom_chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    export(engine.weights(), config, tokenizer, out, dtype, trust_remote_code=model.trust_remote_code)
    return out


def _model_config(path: Path) -> ModelConfig:
    """The model section of a run's resolved config, whichever trainer wrote it."""
    tree = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(tree, dict)
    section = tree["actor_rollout_ref"]["model"] if "actor_rollout_ref" in tree else tree["model"]
    return ModelConfig.model_validate(section)
