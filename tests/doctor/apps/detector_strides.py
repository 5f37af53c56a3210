"""A detector that is called layer by layer when it is made, to measure its strides, and of which
some are made and not used.
"""

import torch
from common import plain_client, plain_server
from detector import Detector


class Measured(Detector):
    def __init__(self):
        super().__init__()
        self.backbone.register_buffer("places", torch.arange(8.0))  # the same in all
        self.eval()
        self.backbone.training = True  # of the layer, and not of those in it
        self.forward(torch.zeros(1, 1, 64, 64))
        with torch.no_grad():
            self(torch.zeros(1, 1, 64, 64))  # before anything is loaded
        self.train()

    def forward(self, scenes):
        return super().forward(scenes).mean((2, 3))


def make_several():
    Measured()
    Measured()
    return Measured()


server = plain_server(Measured)
client = plain_client(make_several)
EXPECTED = {"averaged", "counters"}
