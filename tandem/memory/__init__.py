"""Estimates of a run's memory and time from the shapes of its models, and the free memory of a host."""
