"""Data: rows from files, tasks or user functions, and their prompts as token ids."""
