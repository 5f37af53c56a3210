"""A trainer that makes a network of its own and loads nothing; one BN layer does not learn, so its
weights are always those that come.
"""

from common import Net, plain_client, plain_server


class Unloaded(Net):
    def __init__(self):
        super().__init__()
        self.norm.requires_grad_(False)

    def load_state_dict(self, *_):
        return None


server = plain_server()
client = plain_client(Unloaded)
EXPECTED = {"local-lost", "frozen-moves"}
