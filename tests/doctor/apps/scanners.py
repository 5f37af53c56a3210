"""Each node's pictures have a brightness of their own."""

from common import load_data, plain_client, plain_server
from torch.utils.data import DataLoader, TensorDataset


def load_scans(context):
    images, labels = load_data(context).dataset.tensors
    node = int(context.node_config["partition-id"])
    dataset = TensorDataset(images + 4.0 * node, labels)
    return DataLoader(dataset, batch_size=8, shuffle=True)


server = plain_server()
client = plain_client(data=load_scans)
EXPECTED = {"apart", "averaged", "counters"}
