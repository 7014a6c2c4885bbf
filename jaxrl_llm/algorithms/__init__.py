"""The mathematics of the algorithms: pure functions that know no device and no config."""
