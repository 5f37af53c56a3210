"""A strategy that sends each node arrays of its own: BN is the same, the head is not, and one has
words.
"""

import numpy as np
from common import plain_client, plain_server
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg


class OwnHeads(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for shift, message in enumerate(messages):
            state = arrays.to_torch_state_dict()
            state["head.bias"] = state["head.bias"] + shift
            message.content = message.content.copy()
            message.content["arrays"] = ArrayRecord(state)
            message.content["words"] = ArrayRecord({"names": Array(np.array(["cat", "dog"]))})
        return messages


server = plain_server(strategy=OwnHeads)
client = plain_client()
EXPECTED = {"averaged", "counters"}
