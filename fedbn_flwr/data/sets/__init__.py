"""Data sets of the papers, each read in the format in which it is published."""
