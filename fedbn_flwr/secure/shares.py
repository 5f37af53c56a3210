"""Shares of a secret, of which some number opens it and fewer say nothing: Shamir, How to Share a Secret, CACM 1979.

The secret is the value at 0 of a polynomial over the integers modulo a prime, and a share its value at 1, 2, 3 and so
on. Not the library that Flower brings (pycryptodome, over GF(2^128) in pure Python): with 100 nodes, a server opens 100
secrets of 67 shares each a round, which took it a minute. Here, all of them have the same weights.
"""

import secrets
from collections.abc import Mapping
from functools import lru_cache

#: larger than every secret of 16 bytes
_PRIME = 2**130 - 5
_BYTES = 17


def split(secret: bytes, needed: int, count: int) -> list[bytes]:
    """Return so many shares of a secret of 16 bytes, of which `needed` open it; the first is the value at 1."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(needed - 1))]
    shares = []
    for point in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % _PRIME
        shares.append(value.to_bytes(_BYTES, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret behind shares, given by their points; None if they are of none."""
    weights = _weights(tuple(shares))
    terms = (weight * int.from_bytes(share, "big") for weight, share in zip(weights, shares.values(), strict=True))
    secret = sum(terms) % _PRIME
    return secret.to_bytes(16, "big") if secret < 2**128 else None


@lru_cache(maxsize=64)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the weights of values at these points in the value at 0: Lagrange's formula."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above, below = above * other % _PRIME, below * (other - point) % _PRIME
        weights.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(weights)
