"""A first local step under the corrections of an ordinary training message.

The server's half is `fedbn_flwr/server/carried_values.py`, the mathematics `fedbn_flwr/layerwise/carried.py`.
"""

from collections.abc import Mapping

from fedbn_flwr import wire
from fedbn_flwr.layerwise import Corrected, Exchange
from fedbn_flwr.state import State
from fedbn_flwr.wire import Instruction
from fedbn_flwr.wire.carried import pack_values, read_corrections


def carried_exchange(received: Mapping[str, State], instruction: Instruction) -> Corrected | None:
    """Return the exchange of the first step; None if the instruction asks for no carried corrections."""
    if instruction.layerwise not in wire.CARRIED_MODES:
        return None
    return Corrected(*read_corrections(received.get(wire.CARRIED, {})))


def carried_records(exchange: Exchange | None) -> dict[str, State]:
    """Return the group of the reply with the client's local values, after the step."""
    if not isinstance(exchange, Corrected):
        return {}
    values = pack_values(exchange.requests)
    return {wire.CARRIED: values} if values else {}
