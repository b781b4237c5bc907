"""The config: typed sections, loading, checking, explaining. Nothing here imports torch."""
