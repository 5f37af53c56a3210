"""The FedBN tutorial with `strict=False`: nothing raises, and BN begins anew in every round."""

from tutorial_strict import make_client, server

client = make_client(False)
EXPECTED = {"local-lost"}
