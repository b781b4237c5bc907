"""From data files to batches of ragged token sequences: prompts for reinforcement learning,
responses for supervised fine-tuning, one resumable order of batches for both."""
