"""The HTTP server: OpenAI's API in front of an engine.

This room holds request bodies and their validation, the shapes of responses and errors, streaming, limits
on what clients may send, metrics and draining. Generating, detokenising and stopping text is the engine's
work. Nothing here imports torch or transformers.
"""

from shoal.serve.app import create_app
from shoal.serve.launch import run_server
from shoal.serve.lifecycle import Lifecycle, StopSignal
from shoal.serve.options import ServerOptions
from shoal.serve.server import serve_until_stopped

__all__ = [
    "Lifecycle",
    "ServerOptions",
    "StopSignal",
    "create_app",
    "run_server",
    "serve_until_stopped",
]
