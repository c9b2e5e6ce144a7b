"""Clients for benchmarks, a process of its own: `python load.py PORT PATH STREAMS ROUNDS COUNT GAP SIZE`.

Each connection sends ROUNDS requests one after the other; their starts are spread over the time of one stream.
Prints the time to the first chunk of each request and the time that all took, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop


async def connection(port: int, request: bytes, rounds: int, wait: float, firsts: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    await asyncio.sleep(wait)
    for number in range(rounds):
        started = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        data = await reader.read(1 << 18)
        if number:  # the first opens connections
            firsts.append(time.perf_counter() - started)
        while not data.endswith(b"0\r\n\r\n"):
            more = await reader.read(1 << 18)
            assert more, "broken off"
            data = data[-8:] + more
    writer.close()


async def main() -> None:
    port, path, streams, rounds, count, gap, size = sys.argv[1:]
    body = json.dumps({"model": "m", "stream": True, "prompt": "x" * 1000}).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nx-stream: {count},{gap},{size}\r\n"
        f"Authorization: Bearer key\r\nUser-Agent: bench\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    firsts: list[float] = []
    spread = int(count) * float(gap) / int(streams)
    started = time.perf_counter()
    await asyncio.gather(
        *(connection(int(port), request, int(rounds), i * spread, firsts) for i in range(int(streams)))
    )
    print(json.dumps({"seconds": time.perf_counter() - started, "firsts": firsts}))


if __name__ == "__main__":
    uvloop.run(main())
