"""The servers of the demo: both models on one engine, or each on an engine of its own."""

import json
from dataclasses import dataclass
from typing import Any

from shoal.cli.demo_prompts import CHAT, COMPLETE

MODELS = {CHAT: "smollm2", COMPLETE: "gemma3-270m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """What the command line asks for."""

    kv_bytes: int
    """KV memory of a server, of all of its engines together where they are compared."""
    preset: str
    """Scheduler of each engine."""
    kill: bool = False
    """Whether to serve from two engines, each with both models, and to kill one amid the burst."""
    compare: bool = False
    """Whether to send the burst to an engine for each model, too."""

    def together(self) -> str:
        """The configuration of a server whose engine, or whose two engines, have both models."""
        engines = 2 if self.kill else 1
        return self._config(
            devices=["cpu"] * engines,
            kv_cache={"memory": self.kv_bytes},
        )

    def apart(self, threads: int) -> str:
        """The configuration of an engine for each model, which share memory and ``threads`` evenly."""
        one = {"device": "cpu", "threads": max(1, threads // 2), "kv_memory": self.kv_bytes // 2}
        return self._config(
            devices=[{"name": name, **one} for name in MODELS],
            placement={name: [name] for name in MODELS},
        )

    def _config(self, **settings: Any) -> str:
        """A configuration file; JSON is YAML."""
        services = [{"name": name, "model": model} for name, model in MODELS.items()]
        return json.dumps({"services": services, "scheduler": {"preset": self.preset}, **settings}, indent=1)
