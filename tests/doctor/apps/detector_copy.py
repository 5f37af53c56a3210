"""The detector's average is one of parameters only."""

from detector import make_client, server

client = make_client(lambda net: {name for name, _ in net.named_parameters()})
EXPECTED = {"copy-without-statistics"}
