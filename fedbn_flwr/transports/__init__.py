"""How the exchanges of a layer-wise step reach Flower's nodes: each transport's two ends lie side by side.

- `stacked_transport.py`: stacked nodes of this process,
- `workers_transport.py`: nodes in worker processes of this machine,
- `message_*.py`: any nodes, by Flower's messages, with steps that are suspended and replayed in between,
- `stream_*.py`: any nodes that run at the same time, over one gRPC stream each: the side channel.

`nodes_transport.py` is what they have in common. `node.py` is the door of a node, for every message of a layer-wise step. The
exchanges themselves, and the loop that answers them, are in `fedbn_flwr.layerwise`.
"""
