"""Checkpoints: folders that are written atomically and verified by digests.

`tandem.checkpoint.hf_export` writes models for other programs. This package does not import that module,
because it imports transformers.
"""

from tandem.checkpoint.manager import Checkpoint, CheckpointManager, open_checkpoint

__all__ = ["Checkpoint", "CheckpointManager", "open_checkpoint"]
