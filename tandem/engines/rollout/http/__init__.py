"""Rollout engines that send their requests to an inference server over HTTP."""
