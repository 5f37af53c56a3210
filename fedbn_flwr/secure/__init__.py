"""Sums that nobody can take apart: fixed-point numbers under masks that cancel, without Flower.

Masks are in `fedbn_flwr.secure.masks`, which imports a library of cryptography: only who masks waits for that.
"""

from fedbn_flwr.secure.fixed_point import NotEncodableError, decode, encode
from fedbn_flwr.secure.participants import Participants, ProtocolError

__all__ = ["NotEncodableError", "Participants", "ProtocolError", "decode", "encode"]
