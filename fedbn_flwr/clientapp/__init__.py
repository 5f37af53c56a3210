"""ClientApps: around a `BNClient`, or around a training loop of a user's own."""

import fedbn_flwr.strategies  # noqa: F401  # methods bring the rules of clients
from fedbn_flwr.clientapp.bn_client_app import client_app
from fedbn_flwr.clientapp.mods import (
    count_bytes,
    export_personal,
    guard,
    keep_local,
    keep_states,
    keep_states_in,
)
from fedbn_flwr.clientapp.own_loop_app import ClientApp, numpy_client_app

__all__ = [
    "ClientApp",
    "client_app",
    "count_bytes",
    "export_personal",
    "guard",
    "keep_local",
    "keep_states",
    "keep_states_in",
    "numpy_client_app",
]
