"""Imports from other systems: shell scripts that call verl, and settings of TRL and OpenRLHF."""
