"""What the notebooks do, one file for each: they run it, draw it and say what the reader sees."""
