"""Bytes of memory: what a model's training takes, from shapes alone, and what a host has free."""
