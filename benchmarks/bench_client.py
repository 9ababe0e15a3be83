"""What ``shoal bench`` can measure: its own delays beside a server that sends tokens at exact times.

    python -m benchmarks.bench_client                          # 2,000 streams of 5 tokens per second
    python -m benchmarks.bench_client --streams 4000 --rate 10 --seconds 10

The server does nothing but write a chunk to each stream at its times. Prints what the client says of itself,
and how far the gaps that it saw are from those that were sent: the middle, the 99th percentile, the largest.
Both need a core of their own.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(choice: dict[str, object]) -> bytes:
    return chunk(
        b"data: " + json.dumps({"id": "cmpl-1", "model": "m", "choices": [choice]}).encode() + b"\n\n"
    )


TOKEN = event({"index": 0, "text": " word", "logprobs": None, "finish_reason": None})
LAST = event({"index": 0, "text": "", "finish_reason": "length"})
MODELS = b'{"data": [{"id": "m"}]}'


async def serve(port: int, rate: float) -> None:
    """Stream to each connection at ``rate``, from times that are spread evenly over connections."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await read_head(reader):
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
                continue
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            tokens = json.loads(await reader.readexactly(length))["max_tokens"]
            writer.write(HEAD)
            begin = time.monotonic()
            for number in range(tokens):
                await asyncio.sleep(begin + number / rate - time.monotonic())
                writer.write(TOKEN)
            usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}
            writer.write(LAST + chunk(b"data: " + json.dumps(usage).encode() + b"\n\n"))
            writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


async def read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens per second of a stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.rate))
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_client",
        "--serve",
        str(port),
        "--rate",
        str(options.rate),
    ]
    server = subprocess.Popen(command)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        measure(port, options)
    finally:
        server.terminate()
        server.wait()


def measure(port: int, options: argparse.Namespace) -> None:
    tokens = round(options.seconds * options.rate)
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.yaml"
        lengths = {"prompt": 4, "output": tokens}
        workload.write_text(json.dumps({"workload": {"lengths": lengths, "requests": options.streams}}))
        result = Path(folder) / "vllm.json"
        clients = ["--clients", str(options.streams), "--config", str(workload), "--vllm-json", str(result)]
        subprocess.run(
            [sys.executable, "-m", "shoal.cli", "bench", f"http://127.0.0.1:{port}", *clients], check=True
        )
        figures = json.loads(result.read_text())
    gaps_ms = np.concatenate([np.array(each) for each in figures["itls"]]) * 1e3
    off_ms = np.abs(gaps_ms - 1e3 / options.rate)
    print(f"{len(gaps_ms):,} gaps, off by {np.median(off_ms):.2f} ms in the middle, ", end="")
    print(f"{np.percentile(off_ms, 99):.2f} at the 99th percentile, {off_ms.max():.1f} at most")
    streams = f"{figures['completed']:,} of {options.streams:,} streams"
    print(f"{streams}, {figures['output_throughput']:,.0f} tokens/s")


if __name__ == "__main__":
    main()
