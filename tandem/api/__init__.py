"""Tandem from Python: the runs of the command line, with rows and functions that a program holds.

`import tandem` loads these names when they are first used, and PyTorch with a run."""
