"""The Python API of Tandem: runs as on the command line, with data and functions from your program.

`import tandem` loads these names when they are first used. PyTorch is loaded when a run starts.
"""
