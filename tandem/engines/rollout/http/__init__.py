"""Engines whose requests run on a server that is reached over HTTP."""
