"""The `diagnose` command."""
