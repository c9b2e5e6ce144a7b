"""An engine for benchmarks, a process of its own: `python origin.py PORT`. The request says what it wants to get.

`x-stream: COUNT,GAP,SIZE` asks for so many chunks of so many bytes, so many seconds apart; a gap of 0 for all that the
connection takes. The body's `user` says the same to proxies that keep headers to themselves. `/v1/samples` takes
samples, `/version` names a vLLM if the process was started with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
STORED = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
BEFORE = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"'
BEHIND = b'","finish_reason":null}]}\n\n'
WITH_IDS = b'","finish_reason":null,"token_ids":[1234,56]}]}\n\n'


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head[:-4].split(b"\r\n")[1:])
            body = await reader.readexactly(int(fields.get(b"content-length", 0)))
            if b"x-stream" not in fields and (wanted := re.search(rb'"user": ?"([^"]+)"', body)):
                fields[b"x-stream"] = wanted[1]
            if b"/v1/samples" in head:
                writer.write(STORED)
            elif b"x-stream" not in fields:
                writer.write(NOT_FOUND)
            else:
                count, gap, size = fields[b"x-stream"].split(b",")
                behind = WITH_IDS if b'"return_token_ids":true' in body else BEHIND
                await stream(writer, int(count), float(gap), int(size), behind)
    writer.close()


async def stream(writer: asyncio.StreamWriter, count: int, gap: float, size: int, behind: bytes) -> None:
    event = BEFORE + b"x" * (size - len(BEFORE) - len(behind)) + behind
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    writer.write(HEAD)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for _ in range(count):
        writer.write(chunk)
        due += gap
        if gap:
            await asyncio.sleep(due - loop.time())
        else:
            await asyncio.sleep(0)
            await writer.drain()
    writer.write(b"0\r\n\r\n")


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
