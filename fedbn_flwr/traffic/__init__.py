"""Count exchanges and bytes."""
