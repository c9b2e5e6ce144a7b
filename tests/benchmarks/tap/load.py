"""Clients for benchmarks, a process of its own: `python load.py PORT PATH STREAMS COUNT GAP SIZE WARM_S SECONDS`.

Each connection sends one request after the other; their starts are spread over the time of one stream. After WARM_S
it prints a line, then measures for SECONDS, prints another, and lets what is in flight end. That is JSON: the chunks
that came in between, the seconds, and the time to the first chunk of each request that began in between.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop


class Load:
    """All connections, and what they have seen."""

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        self.measuring = self.over = False
        self.chunks = 0
        self.firsts: list[float] = []

    async def connection(self, wait: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        await asyncio.sleep(wait)
        while not self.over:
            started, counts = time.perf_counter(), self.measuring
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.partition(b"\r\n")[0], head
            data = await reader.read(1 << 18)
            if counts and not self.over:
                self.firsts.append(time.perf_counter() - started)
            self.chunks += data.count(b"data: ")
            while not data.endswith(b"0\r\n\r\n"):
                more = await reader.read(1 << 18)
                assert more, "broken off"
                self.chunks += more.count(b"data: ")
                data = data[-8:] + more
        writer.close()


async def main() -> None:
    port, path, streams, count, gap, size, warm_s, seconds = sys.argv[1:]
    wanted = f"{count},{gap},{size}"
    body = json.dumps({"model": "m", "stream": True, "prompt": "x" * 1000, "user": wanted}).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nx-stream: {wanted}\r\n"
        f"Authorization: Bearer key\r\nUser-Agent: bench\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    load = Load(int(port), request)
    spread = int(count) * float(gap) / int(streams)
    running = [asyncio.create_task(load.connection(i * spread)) for i in range(int(streams))]
    await asyncio.sleep(float(warm_s))
    print(json.dumps("warm"), flush=True)
    load.measuring, before, started = True, load.chunks, time.perf_counter()
    await asyncio.sleep(float(seconds))
    took = time.perf_counter() - started
    print(json.dumps({"chunks": load.chunks - before, "seconds": took, "firsts": load.firsts}), flush=True)
    load.over = True
    await asyncio.gather(*running)


if __name__ == "__main__":
    uvloop.run(main())
