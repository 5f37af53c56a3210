"""What every test can rely on."""

import torch

# tests run side by side, one a core, and compare bits
torch.set_num_threads(1)
