"""Search over documents: an index in this process, and a client and a server of the API that Search-R1 uses."""
