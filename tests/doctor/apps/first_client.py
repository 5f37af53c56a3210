"""The server averages parameters into a copy of the first client's model."""

from common import plain_client, plain_server
from parameters_averaged import Parameters


class First(Parameters):
    def start_with(self, states):
        self.net.load_state_dict(states[0])


server = plain_server(strategy=First)
client = plain_client()
EXPECTED = {"one-node"}
