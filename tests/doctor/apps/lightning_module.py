"""PyTorch Lightning: the network is called by a module's training step."""

import lightning
import torch
import torch.nn.functional as F
from common import Net, plain_client, plain_server


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch, index):
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer():
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)


def fit(module, loader):
    trainer().fit(module, loader)


def score(module, loader):
    trainer().test(module, loader, verbose=False)


server = plain_server(Module)
client = plain_client(Module, fit, score)
EXPECTED = {"averaged", "counters"}
