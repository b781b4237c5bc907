"""Rollout engines whose requests run on a server over HTTP."""
