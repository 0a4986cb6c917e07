"""The relay between the host's loopback and the fabric."""

import asyncio
import socket

from e2e.cluster import relay


async def _echo_until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Answers only when the client has ended its side: one direction closes before the other.
    data = await reader.read()
    writer.write(data.upper())
    writer.close()


async def _relay_to(port: int) -> tuple[asyncio.Task[None], int]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    task = asyncio.ensure_future(relay.serve(listener, "127.0.0.1", port))
    return task, listener.getsockname()[1]


async def test_bytes_pass_both_ways_after_one_side_has_ended() -> None:
    server = await asyncio.start_server(_echo_until_end, "127.0.0.1", 0)
    task, port = await _relay_to(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = b"x" * 1_000_000
    writer.write(payload)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 60) == payload.upper()
    writer.close()
    task.cancel()
    server.close()


async def test_a_target_that_is_away_ends_the_connection_and_not_the_relay() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused, and nobody else gets the port meanwhile
        task, port = await _relay_to(taken.getsockname()[1])
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
    assert not task.done()
    task.cancel()
