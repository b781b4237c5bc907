"""The benchmark `tandem bench`.

It measures the phases of real training steps, with dummy weights, prompts and rewards.
"""
