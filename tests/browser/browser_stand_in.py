"""A server with the page's files and invented answers; the first part of a path names the scene.

``/loaded/`` is the page, ``/loaded/live`` its stream. ``/key/...`` is the scene idle with keys: KEY for
clients and ADMIN_KEY for operators.
"""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from browser_scenes import MARKUP, SCENES

STATIC = Path(__file__).parents[2] / "src/shoal/serve/page/static"
KEY = "sk-client-1f0c"
ADMIN_KEY = "sk-admin-77ab"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class StandIn:
    """The server, on a free port of this machine; ``received`` are (method, path, headers, body) of requests.

    interval_s: time between snapshots. pace_s: time between the pieces of an answer.
    """

    def __init__(self, interval_s: float = 0.1, pace_s: float = 0.0, port: int = 0) -> None:
        self.interval_s, self.pace_s = interval_s, pace_s
        self.received: list[tuple[str, str, dict[str, str], Any]] = []
        self.operations: list[dict[str, Any]] = []
        self.sent = threading.Semaphore(0)  # of snapshots, since the last await_snapshots()
        self.hold = threading.Event()  # while it is set, the stream sends nothing new and ends
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._ended = False

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests for a path."""
        return [body for _, where, _, body in self.received if where == path]

    def await_snapshots(self, count: int) -> None:
        """Wait until so many more snapshots were sent."""
        while self.sent.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self.sent.acquire(timeout=20)

    def snapshots(self, scene: str) -> Iterator[dict[str, Any]]:
        begin = time.monotonic()
        while not self._ended and not self.hold.is_set():
            yield SCENES[scene](time.monotonic() - begin)
            self.sent.release()
            time.sleep(self.interval_s)


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_DELETE(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(json.loads(raw) if raw else None)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, body: Any) -> None:
            scene, _, path = self.path.partition("?")[0].lstrip("/").partition("/")
            stand_in.received.append((self.command, path, dict(self.headers), body))
            if path == "" or path.startswith("page/"):
                self._file(path.removeprefix("page/") or "index.html")
            elif scene == "key" and self._bearer() not in (KEY, ADMIN_KEY):
                self._json(401, {"error": {"message": "this route needs an API key"}})
            elif path == "live":
                if stand_in.hold.is_set():
                    self._json(503, {"error": {"message": "the server is away"}})
                else:
                    self._events(
                        json.dumps(one) for one in stand_in.snapshots("idle" if scene == "key" else scene)
                    )
            elif path.startswith("admin/"):
                self._admin(scene, path.removeprefix("admin/"), body)
            elif path in ("v1/chat/completions", "v1/completions"):
                self._generate(path, body)
            else:
                self._json(404, {"error": {"message": f"there is no route {self.path}"}})

        def _bearer(self) -> str:
            return self.headers.get("Authorization", "").removeprefix("Bearer ")

        def _admin(self, scene: str, path: str, body: Any) -> None:
            if scene == "key" and self._bearer() != ADMIN_KEY:
                self._json(403, {"error": {"message": "the API key 'client' is not the admin key"}})
            elif self.command == "GET":
                self._json(200, {"object": "list", "data": stand_in.operations})
                for operation in stand_in.operations:
                    if operation["state"] == "running":
                        operation["done"] += 60
                        if operation["done"] >= 100:
                            operation |= {"state": "done", "ended": time.time(), "done": 100}
            elif path == "services/gemma3-270m/unload":
                self._json(
                    409, {"error": {"message": "operation 1 (load_service) is still running; wait for it"}}
                )
            else:
                target = body["model"] if body else path.split("/")[1]
                verb = "add" if body else path.split("/")[2] if self.command == "POST" else "remove"
                kind = f"{verb}_service"
                operation = {
                    "id": str(len(stand_in.operations) + 1), "kind": kind, "target": target,
                    "state": "running", "progress": "fetching weights", "done": 0, "total": 100,
                    "error": None, "started": time.time(), "ended": None,
                }  # fmt: skip
                stand_in.operations.append(operation)
                self._json(202, operation)

        def _generate(self, path: str, body: Any) -> None:
            if "break" in json.dumps(body):
                self._json(400, {"error": {"message": f"max_tokens must be at least 1 {MARKUP}"}})
                return
            chunks = chat_chunks(body) if path.startswith("v1/chat") else text_chunks(body)
            self._events(map(json.dumps, chunks), "[DONE]")

        def _events(self, events: Iterator[str], last: str = "") -> None:
            self._head(200, "text/event-stream")
            try:
                for data in events:
                    self.wfile.write(f"data: {data}\n\n".encode())
                    self.wfile.flush()
                    if last:
                        time.sleep(stand_in.pace_s)
                if last:
                    self.wfile.write(f"data: {last}\n\n".encode())
            except (BrokenPipeError, ConnectionResetError):
                pass  # the page went away

        def _file(self, name: str) -> None:
            file = STATIC / name
            if not file.is_file():
                self._json(404, {"error": {"message": f"there is no file {name}"}})
                return
            self._head(200, TYPES[file.suffix])
            self.wfile.write(file.read_bytes())

        def _json(self, status: int, body: Any) -> None:
            self._head(status, "application/json")
            self.wfile.write(json.dumps(body).encode())

        def _head(self, status: int, kind: str) -> None:
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind, "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler


ANSWER = ["Herring", ", ", "cod", " and ", "trout", " <b>", "swim", "."]


def chat_chunks(body: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a chat's stream: a call of the first tool if there are tools, else ANSWER."""
    if body.get("tools"):
        name = body["tools"][0]["function"]["name"]
        for arguments in ('{"city": ', '"Oslo"}'):
            function = (
                {"name": name, "arguments": arguments} if arguments[0] == "{" else {"arguments": arguments}
            )
            call = {"index": 0, "id": "call_1", "type": "function", "function": function}
            yield {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        return
    for number, token in enumerate(ANSWER):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": token}, "finish_reason": None}
        if body.get("logprobs"):
            others = [{"token": token, "logprob": -0.2}, {"token": " or", "logprob": -1.9 - number}]
            choice["logprobs"] = {"content": [{"token": token, "logprob": -0.2, "top_logprobs": others}]}
        yield {"choices": [choice]}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"prompt_tokens": 12, "completion_tokens": len(ANSWER)}
    yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 4}}}


def text_chunks(body: Any) -> Iterator[dict[str, Any]]:
    for token in ANSWER:
        choice: dict[str, Any] = {"index": 0, "text": token, "finish_reason": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5, " or": -2.0}],
            }  # fmt: skip
        yield {"choices": [choice]}
    yield {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(ANSWER)}}
