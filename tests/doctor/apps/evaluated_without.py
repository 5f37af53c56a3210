"""The server evaluates a model that is made anew, with the parameters of what was averaged."""

import torch
from common import Net, load_data, plain_client, plain_server, test
from flwr.app import Context, MetricRecord, RecordDict


def evaluate(server_round, arrays):
    net = Net()
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for name, value in arrays.to_torch_state_dict().items():
            if name in parameters:
                parameters[name].copy_(value)
    context = Context(0, 0, {"partition-id": 7}, RecordDict(), {})
    return MetricRecord({"accuracy": test(net, load_data(context))})


server = plain_server(evaluate=evaluate)
client = plain_client()
EXPECTED = {"evaluated-without", "averaged", "counters"}
