"""A port that leads to the server's side channel, for apps of a site that reach nothing but their
SuperNode.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from fedbn_flwr.deployment import host_and_port

#: the port that the apps of a site know, beside that of their SuperNode
PORT = 9095
#: told that a connection was `opened` or `closed`, and the bytes that it has taken to the server
CountBytes = Callable[[str, int], None]
#: seconds for a connection to the server
_CONNECT_TIMEOUT = 10.0


def start_relay(
    host: str, target: str, port: int = PORT, record: CountBytes = lambda event, count: None
) -> int:
    """Pass every connection to a port of this machine on to the target, HOST:PORT.

    Returns the port.

    What passes is encrypted between the app and the server: the relay reads none of it. `record` is
    told of every connection when it is opened, and when it is closed with the bytes that it has
    taken to the server. OSError if the port is taken.
    """

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record("opened", 0)
        record("closed", await _pass_on(reader, writer, target))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(pass_on, host, port))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return int(server.sockets[0].getsockname()[1])


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> int:
    try:
        connecting = asyncio.open_connection(*host_and_port("the target", target))
        far_reader, far_writer = await asyncio.wait_for(connecting, _CONNECT_TIMEOUT)
    except OSError as error:
        print(
            f"the server's side channel {target} cannot be reached: {error}",
            file=sys.stderr,
            flush=True,
        )
        writer.close()
        return 0
    # the end of one connection is the end of the other: both ends learn of it at once
    ways = [
        asyncio.create_task(_pump(reader, far_writer)),
        asyncio.create_task(_pump(far_reader, writer)),
    ]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for end in (writer, far_writer):
        end.close()
    await asyncio.wait(ways)
    return ways[0].result()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Return the number of bytes that have passed."""
    count = 0
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            count += len(data)
            await writer.drain()
    return count
