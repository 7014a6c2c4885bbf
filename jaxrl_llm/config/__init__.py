"""Config files: how they are read, what their fields may hold, and which settings go together."""
