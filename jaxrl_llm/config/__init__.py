"""Config files: loading, the table of fields, and checks of single fields and of combinations."""
