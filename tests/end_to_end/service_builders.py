"""An engine whose services come and go at random while requests run, checked at every step."""

import random
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from end_to_end_builders import _check_books, make_request
from references import reference_pass

from at_hand import DEVICE
from shoal.core import FinishReason, Service
from shoal.engine import Engine, EngineOptions, ServiceInfo, build_engine
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions, WeightsOptions

CLOSE = 1e-3
"""Where an undisturbed model finds two tokens this near to each other, either may come."""


@dataclass
class Asked:
    """A request and what came of it."""

    folder: Path
    prompt: list[int]
    count: int
    dtype: str = "float32"
    may_end: bool = False
    """Its service was removed without waiting for it."""
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class Walk:
    """One engine; ``folders`` are the models by kind, and a service ``<kind>-<n>`` has that of its kind.

    per_change: requests that come during a change, however long it takes. dtype: of all services, or by name.
    pinned: services whose weights never leave.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        begin: list[str],
        *,
        seed: int = 0,
        prompts: tuple[int, int] = (1, 60),
        output: int = 16,
        vocab: int = 199,
        per_change: int = 12,
        dtype: str | Mapping[str, str] = "float32",
        kv: dict[str, Any] | None = None,
        weights: WeightsOptions | None = None,
        pinned: Collection[str] = (),
        **scheduler: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.folders = dict(folders)
        self.prompts, self.output, self.vocab = prompts, output, vocab
        self.per_change, self.dtype, self.pinned = per_change, dtype, pinned
        self.asked: dict[str, Asked] = {}
        self.unlike: list[str] = []
        """Requests whose tokens differ from the undisturbed ones where these were a near tie."""
        self.present = set(begin)
        self.removing: dict[str, Future[None]] = {}
        self.adding: dict[str, Future[ServiceInfo]] = {}
        self.changes = self.relayouts = self._fresh = 0
        options = EngineOptions(
            services=tuple(self._service(name) for name in begin),
            kv_cache=KVCacheOptions(**{"memory_bytes": 256 << 10, "block_size": 4} | (kv or {})),
            scheduler=SchedulerOptions(**scheduler),
            weights=weights or WeightsOptions(),
            threads=1,
            device=DEVICE,
        )
        self.engine: Engine = build_engine(options, {name: self._folder(name) for name in begin})[0]
        self._shape = self._merged()

    def _merged(self) -> tuple[int, int]:
        layout = self.engine._pool.layout
        return layout.merged_bytes, layout.merged_blocks

    def _folder(self, service: str) -> Path:
        return self.folders[service.rpartition("-")[0]]

    def _service(self, name: str) -> Service:
        dtype = self.dtype if isinstance(self.dtype, str) else self.dtype[name]
        return Service(name=name, model=name, dtype=dtype, pin=name in self.pinned)

    def submit(self, service: str, count: int = 0) -> None:
        length, rng = self.random.randint(*self.prompts), self.random
        own = random.Random(rng.randrange(8))  # few different prompts, so that prefixes are found again
        prompt = [own.randrange(3, self.vocab) for _ in range(length)]
        name = f"r{len(self.asked)}"
        self.asked[name] = Asked(
            self._folder(service), prompt, count or rng.randint(1, self.output), self._service(service).dtype
        )
        self.engine.submit(make_request(name, service, prompt, self.asked[name].count, seed=1))

    def add(self, name: str) -> None:
        self.adding[name] = self.engine.add_service(self._service(name), self._folder(name))

    def remove(self, name: str, *, drain: bool) -> None:
        self.present.discard(name)
        if not drain:
            for request_id in self.engine._scheduler.requests_of(name):
                self.asked[request_id].may_end = True
        self.removing[name] = self.engine.remove_service(name, drain=drain)

    def step(self) -> None:
        for event in self.engine.step():
            asked = self.asked[event.request_id]
            assert asked.finish is None, "an event after the last"
            assert event.error is None
            asked.tokens += event.tokens
            asked.finish = event.finish
        _check_books(self.engine)
        if self._merged() != self._shape:
            self._shape = self._merged()
            self.relayouts += 1
        for name in [name for name, future in self.adding.items() if future.done()]:
            info = self.adding.pop(name).result()
            assert info.model == name
            self.present.add(name)
            self.changes += 1
        for name in [name for name, future in self.removing.items() if future.done()]:
            self.removing.pop(name).result()
            assert name not in self.engine.stats().services
            self.changes += 1

    @property
    def changing(self) -> bool:
        return bool(self.adding or self.removing)

    def finish(self) -> None:
        while self.engine.busy or self.changing:
            if self.engine.idle and self.engine.needs_polling:
                time.sleep(0.0005)  # while weights come
            self.step()

    def walk(self, changes: int, names: list[str], most: int = 4, always: tuple[str, ...] = ()) -> None:
        """So many changes, one at a time, with requests all along; at most ``most`` services at once."""
        target = self.changes + changes
        while self.changes < target:
            if not self.changing:
                self._fresh = self.per_change
                gone = [name for name in names if name not in self.present]
                going = sorted(self.present - set(always))
                if not going or (gone and len(self.present) < most and self.random.random() < 0.6):
                    self.add(self.random.choice(gone))
                else:
                    self.remove(self.random.choice(going), drain=self.random.random() < 0.5)
            self.load()
            self.step()

    def load(self) -> None:
        if not self.present or not self._fresh:
            if not self.engine.busy:
                time.sleep(0.001)  # while something loads
        elif self.engine.unfinished < 10:
            self._fresh -= 1
            self.submit(self.random.choice(sorted(self.present)))

    def check_outputs(self) -> None:
        """Every request has got what it gets when nothing changes around it."""
        for name, asked in self.asked.items():
            if asked.finish is FinishReason.CANCELLED:
                assert asked.may_end, f"{name} was cancelled though its service stays"
            else:
                assert asked.finish is FinishReason.LENGTH
                assert len(asked.tokens) == asked.count
            if not asked.tokens or asked.dtype != "float32":
                continue
            # Greedy output is what the whole of it, read at once, finds likeliest behind each of its tokens.
            logprobs, _ = reference_pass(asked.folder, (*asked.prompt, *asked.tokens[:-1]))
            likeliest = logprobs[len(asked.prompt) - 1 :].topk(2)
            expected = likeliest.indices[:, 0].tolist()
            if asked.tokens != expected:
                at = [mine == its for mine, its in zip(asked.tokens, expected, strict=True)].index(False)
                assert likeliest.values[at].diff().abs() < CLOSE, name
                self.unlike.append(name)
        assert len(self.unlike) <= len(self.asked) // 1000 + 1
