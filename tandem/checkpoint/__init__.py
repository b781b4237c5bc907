"""Checkpoints that are complete or do not exist: atomic folders, checked by digests.

`tandem.checkpoint.hf_export` writes models for other programs. It is not imported here, because it imports
transformers.
"""

from tandem.checkpoint.manager import Checkpoint, CheckpointManager, open_checkpoint

__all__ = ["Checkpoint", "CheckpointManager", "open_checkpoint"]
