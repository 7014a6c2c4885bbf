"""What a run needs on a TPU slice that need not be there, by the real TPU compiler."""
