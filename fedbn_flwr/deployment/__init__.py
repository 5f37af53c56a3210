"""A federation of real machines: keys and configuration for its server and its sites, checks, status and results.

Nothing here imports PyTorch before a command needs it.
"""
