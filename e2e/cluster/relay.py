"""Relays TCP connections from a listening socket to an address in another network namespace.

Runs as a program of its own, inside the target's namespace; the listening
socket was made by its parent, in the host's namespace, and is inherited:
that's how a loopback port of the host leads into the fabric.

    python3 relay.py LISTENING_FD ADDRESS PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

_CHUNK = 256 * 1024


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    # One direction may end while the other goes on.
    if writer.can_write_eof():
        writer.write_eof()


async def relay(
    client_reader: asyncio.StreamReader,
    client_writer: asyncio.StreamWriter,
    address: str,
    port: int,
) -> None:
    """Joins one client with a new connection to the target until both have ended."""
    writers = [client_writer]
    try:
        server_reader, server_writer = await asyncio.open_connection(address, port)
        writers.append(server_writer)
        copies = [
            asyncio.ensure_future(_copy(client_reader, server_writer)),
            asyncio.ensure_future(_copy(server_reader, client_writer)),
        ]
        # An error ends both; a plain end of one direction doesn't.
        done, pending = await asyncio.wait(copies, return_when=asyncio.FIRST_EXCEPTION)
        for each in pending:
            each.cancel()
        await asyncio.gather(*done, *pending, return_exceptions=True)
    except OSError:
        pass  # the target isn't up: the client sees its connection end
    finally:
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


async def serve(listener: socket.socket, address: str, port: int) -> None:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay(reader, writer, address, port)

    server = await asyncio.start_server(accepted, sock=listener)
    async with server:
        await server.serve_forever()


def main() -> None:
    descriptor, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(listener, address, port))


if __name__ == "__main__":
    main()
