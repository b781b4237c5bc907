"""Memory and time of a run, computed from model shapes, and the free memory of a host."""
