"""The server's side of every strategy: sampling, replies, averaging, layer-wise rounds."""
