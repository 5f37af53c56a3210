"""The ClientApp that `flwr run` and a SuperNode start."""

from fedbn_flwr.clientapp import client_app, keep_states
from fedbn_flwr.experiments import client_fn

app = client_app(client_fn, mods=[keep_states])
