"""The files that a run writes, and the lines that it prints."""
