"""What an instruction's words `layerwise` and `freeze` ask of a client."""

from typing import get_args

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Mode
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
