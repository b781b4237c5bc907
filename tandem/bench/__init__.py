"""`tandem bench`: the phases of real training steps, measured with dummy weights, prompts and rewards."""
