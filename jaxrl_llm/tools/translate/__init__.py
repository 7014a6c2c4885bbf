"""Translates a config of TRL, veRL, EasyR1 or Search-R1 into one of ours, key by key."""
