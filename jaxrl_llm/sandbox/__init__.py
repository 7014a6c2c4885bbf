"""Programs that nobody has read: bubblewrap confines them, and their tests are judged in another process."""
