"""Load data files and make batches of ragged token sequences.

This package reads prompts for reinforcement learning and responses for supervised fine-tuning. The order of
the batches is deterministic, and a run can resume it from a checkpoint.
"""
