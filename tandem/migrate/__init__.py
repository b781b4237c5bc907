"""Convert shell scripts that call verl, and settings of TRL and OpenRLHF, to Tandem's config."""
