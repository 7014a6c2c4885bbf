"""A pretrained model learns, from packages alone: `python -m benchmarks.real`."""
