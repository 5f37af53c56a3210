"""Share clients out over processes of one machine."""
