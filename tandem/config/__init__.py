"""The config: typed sections, loading, checking, explaining. Imports no torch."""
