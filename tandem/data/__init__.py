"""From data files to batches of ragged token sequences: prompts for reinforcement learning,
responses for supervised fine-tuning, one resumable loader for both."""

from tandem.data.loader import BatchLoader, all_batches
from tandem.data.prompts import PromptDataset
from tandem.data.sft import SFTDataset

__all__ = ["BatchLoader", "PromptDataset", "SFTDataset", "all_batches"]
