"""How long things take here, and how long they must take at least."""
