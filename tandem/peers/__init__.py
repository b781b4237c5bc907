"""Tables that map settings of other systems to Tandem's config keys: one YAML file per system."""
