"""The command `diagnose`."""
