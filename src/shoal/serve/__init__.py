"""The HTTP server: OpenAI's and Ollama's APIs in front of a cluster of engines.

It validates request bodies, renders chats, formats responses and errors, streams, limits clients, serves
metrics and drains. Engines generate; ``frontend`` detokenizes and applies stop strings. Nothing here imports
torch or transformers. A start imports little; the rest is imported while engines load.
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
"""Modules of the public names, which are imported lazily."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.serve' has no attribute {name!r}")
    return getattr(import_module(f"shoal.serve.{_MODULES[name]}"), name)
