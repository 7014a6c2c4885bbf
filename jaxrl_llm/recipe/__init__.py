"""What a run is asked to do: the fields of a config, and what does not go together."""
