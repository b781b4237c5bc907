"""Whole checkpoints or none: atomic folders checked by digests. `tandem.checkpoint.hf_export` writes
models for other programs; it stands apart because it imports transformers."""

from tandem.checkpoint.manager import Checkpoint, CheckpointManager, open_checkpoint

__all__ = ["Checkpoint", "CheckpointManager", "open_checkpoint"]
