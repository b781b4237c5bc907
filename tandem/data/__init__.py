"""From data files to batches of ragged token sequences: prompts for reinforcement learning,
responses for supervised fine-tuning, one resumable order of batches for both."""

from tandem.data.loader import BatchLoader, BatchOrder, EveryRow
from tandem.data.preferences import PreferenceDataset
from tandem.data.prompts import PromptDataset
from tandem.data.sft import SFTDataset

__all__ = ["BatchLoader", "BatchOrder", "EveryRow", "PreferenceDataset", "PromptDataset", "SFTDataset"]
