"""What a run writes and prints."""
