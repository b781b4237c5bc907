"""Tables of other systems' settings and what they correspond to here: a YAML file for each system."""
