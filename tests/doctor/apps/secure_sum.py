"""SecAgg+, which clips what it sends: images with large numbers have variances beyond that."""

from common import Net, load_data
from flwr.client import ClientApp
from flwr.client.mod import secaggplus_mod
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from numpy_client import Client, get_weights
from torch.utils.data import DataLoader, TensorDataset

NODES = 3
#: at 200 of SecAgg+'s 1,000 samples, values end at 8 * 1,000 / 200 = 40
SCALE = 40


def client_fn(context):
    images, labels = load_data(context).dataset.tensors
    data = TensorDataset(SCALE * images, labels)
    return Client(DataLoader(data, batch_size=8, shuffle=True)).to_client()


server = ServerApp()


@server.main()
def main(grid, context):
    weights = ndarrays_to_parameters(get_weights(Net()))
    strategy = FedAvg(initial_parameters=weights, fraction_evaluate=0.0)
    config = ServerConfig(num_rounds=int(context.run_config["num-server-rounds"]))
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)


client = ClientApp(client_fn=client_fn, mods=[secaggplus_mod])
EXPECTED = {"not-a-mean", "averaged"}
