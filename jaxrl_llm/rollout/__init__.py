"""Where completions come from. An engine knows token ids, not text."""
