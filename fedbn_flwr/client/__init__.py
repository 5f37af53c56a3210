"""The Flower client: local training, the rules that methods add to it, layer-wise steps, evaluation."""

from fedbn_flwr.client.bn_client import BNClient, Metrics, Reply, frozen_parts, layerwise_mode, pick_device

__all__ = ["BNClient", "Metrics", "Reply", "frozen_parts", "layerwise_mode", "pick_device"]
