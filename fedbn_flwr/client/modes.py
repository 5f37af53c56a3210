"""What an instruction's words `layerwise` and `freeze` ask of a client."""

from collections.abc import Mapping
from typing import get_args

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Corrected, Exchange, Mode
from fedbn_flwr.layerwise.carried import pack_values, read_corrections
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction


def layerwise_mode(instruction: Instruction) -> Mode:
    """Return the mode of an instruction's layer-wise step."""
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    modes |= {"carried": "fused", "carried-forward": "forward"}
    if instruction.layerwise not in modes:
        raise ValueError(f"unknown layerwise {instruction.layerwise!r}; known: {', '.join(wire.LAYERWISE_MODES)}")
    return modes[instruction.layerwise]


def frozen_parts(freeze: str) -> dict[str, bool]:
    """Return the arguments of `norm.freeze` for an instruction's `freeze`."""
    if freeze not in wire.FREEZES:
        raise ValueError(f"unknown freeze {freeze!r}; known: {', '.join(wire.FREEZES)}")
    return {"statistics": freeze in ("statistics", "both"), "affine": freeze in ("affine", "both")}


def carried_exchange(received: Mapping[str, State], instruction: Instruction) -> Corrected | None:
    """Return a client's exchange under received corrections; None if the instruction asks for none."""
    if instruction.layerwise not in wire.CARRIED_MODES:
        return None
    entries = received.get(wire.CARRIED, {})
    return Corrected(*read_corrections({name: value.unsqueeze(0) for name, value in entries.items()}))


def carried_records(exchange: Exchange | None) -> dict[str, State]:
    """Return the group of a client's reply with its local values, after the step."""
    values = pack_values(exchange.requests) if isinstance(exchange, Corrected) else {}
    return {wire.CARRIED: {name: rows[0] for name, rows in values.items()}} if values else {}
