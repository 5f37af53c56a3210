"""Sums that nobody can take apart: fixed-point numbers under masks that cancel, without Flower."""

from fedbn_flwr.secure.fixed_point import NotEncodableError, decode, encode
from fedbn_flwr.secure.masks import (
    Participants,
    ProtocolError,
    Share,
    cancel,
    mask,
    new_private_key,
    open_shares,
    own_seed,
    pair_seed,
    public_key,
    seal_shares,
    threshold,
    unseal_share,
)

__all__ = [
    "NotEncodableError",
    "Participants",
    "ProtocolError",
    "Share",
    "cancel",
    "decode",
    "encode",
    "mask",
    "new_private_key",
    "open_shares",
    "own_seed",
    "pair_seed",
    "public_key",
    "seal_shares",
    "threshold",
    "unseal_share",
]
