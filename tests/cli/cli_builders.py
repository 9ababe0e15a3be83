"""A small server with just enough of OpenAI's API."""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """\
# TYPE shoal_preemptions_total counter
shoal_preemptions_total{engine="0",service="chat"} 3.0
shoal_preemptions_total{engine="0",service="complete"} 0.0
# TYPE shoal_kv_bytes gauge
shoal_kv_bytes{engine="0",use="total"} 2.5165824e+07
shoal_kv_bytes{engine="0",use="live"} 1.8874368e+07
shoal_kv_bytes{engine="0",use="padding"} 1.048576e+06
shoal_kv_bytes{engine="0",use="unfilled"} 5.24288e+05
shoal_kv_bytes{engine="0",use="external"} 1.572864e+06
"""


@dataclass
class FakeApi:
    """The responses of the server, and the requests that it got."""

    words: list[str] = field(default_factory=lambda: ["Hello", " there", "!"])
    """The pieces of a stream."""
    reject: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and message of the error, for services that reject requests."""
    code: str | None = None
    """Code of these errors."""
    cut: bool = False
    """End streams without a finish reason."""
    break_off: str | None = None
    """End streams with this error."""
    bodies: list[dict] = field(default_factory=list)
    """The bodies of all requests."""
    admin: dict[str, object] = field(default_factory=dict)
    """What the operators' routes say; (status, answer), or an answer, or a list of those to take in turn."""
    changes: list[tuple[str, str, object]] = field(default_factory=list)
    """Method, path and body of the requests that change something."""
    headers: list[dict] = field(default_factory=list)
    """Of the requests for operators' routes."""
    wait: threading.Event | None = None
    """Streams wait for it after their first piece."""
    api_key: str | None = None
    """The key that requests for services must have."""
    pages: list[str] = field(default_factory=list)
    """Pages of metrics to send before METRICS."""

    def events(self, body, chat):
        for word in self.words:
            yield {"choices": [{"index": 0, **({"delta": {"content": word}} if chat else {"text": word})}]}
        if self.break_off:
            yield {"error": {"message": self.break_off}}
        if self.cut or self.break_off:
            return
        yield {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]}
        if body.get("stream_options", {}).get("include_usage"):
            yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(self.words)}}
        yield None


@contextmanager
def fake_server(api):
    """``api`` behind HTTP on a free loopback port; gives its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/v1/models":
                if api.api_key and self.headers["Authorization"] != f"Bearer {api.api_key}":
                    self._send(401, json.dumps({"error": {"message": "wrong key"}}))
                    return
                cards = [{"id": name, "max_model_len": 2048} for name in ("chat", "complete")]
                self._send(200, json.dumps({"object": "list", "data": cards}))
            elif self.path.startswith("/admin/"):
                self._admin()
            elif self.path == "/metrics":
                self._send(200, api.pages.pop(0) if api.pages else METRICS)
            else:
                self._send(200 if self.path == "/health" else 404, "{}")

        def _admin(self):
            api.headers.append(dict(self.headers))
            answer = api.admin.get(self.path.removeprefix("/admin/"), (404, {}))
            if isinstance(answer, list) and answer and isinstance(answer[0], dict):
                answer = answer.pop(0)
            status, body = answer if isinstance(answer, tuple) else (200, answer)
            self._send(status, json.dumps(body))

        def _change(self):
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            api.changes.append((self.command, self.path.removeprefix("/admin/"), body))
            self._admin()

        def do_DELETE(self):
            self._change()

        def do_POST(self):
            if self.path.startswith("/admin/"):
                self._change()
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.bodies.append(body)
            if body["model"] in api.reject:
                status, message = api.reject[body["model"]]
                self._send(status, json.dumps({"error": {"message": message, "code": api.code}}))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in api.events(body, self.path == "/v1/chat/completions"):
                data = "[DONE]" if event is None else json.dumps(event)
                self.wfile.write(f"data: {data}\n\n".encode())
                if api.wait is not None:
                    api.wait.wait(30)

        def _send(self, status, text):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
