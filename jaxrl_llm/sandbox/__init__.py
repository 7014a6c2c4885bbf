"""Runs untrusted code, such as a model's programs: bubblewrap confines it, and another process judges its tests."""
