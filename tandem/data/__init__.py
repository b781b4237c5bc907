"""Load data files and make batches of ragged token sequences.

This package reads prompts for reinforcement learning and responses for supervised fine-tuning. Both come in
an order of batches that a checkpoint can resume.
"""
