"""The HTTP server: OpenAI's API in front of an engine.

This room holds request bodies and their validation, the shapes of responses and errors, streaming, limits
on what clients may send, metrics and draining. Generating, detokenising and stopping text is the engine's
work. Nothing here imports torch or transformers. What a server starts with is imported without the rest,
which takes longer and can come while engines load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.serve.app import create_app
    from shoal.serve.launch import run_server
    from shoal.serve.lifecycle import Lifecycle
    from shoal.serve.options import ServerOptions
    from shoal.serve.server import serve_until_stopped
    from shoal.serve.stop_signal import StopSignal

__all__ = [
    "Lifecycle",
    "ServerOptions",
    "StopSignal",
    "create_app",
    "run_server",
    "serve_until_stopped",
]

_MODULES = {
    "Lifecycle": "lifecycle",
    "ServerOptions": "options",
    "StopSignal": "stop_signal",
    "create_app": "app",
    "run_server": "launch",
    "serve_until_stopped": "server",
}
"""Where names are; they are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.serve' has no attribute {name!r}")
    return getattr(import_module(f"shoal.serve.{_MODULES[name]}"), name)
