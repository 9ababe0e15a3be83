"""A fake cluster and tokenizer, and helpers that run the app in front of them."""

import asyncio
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from fastapi import FastAPI

from inline_codecs import InlineCodec
from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.status import ClusterInfo, EngineState, EngineStatus, RequestTable, ServiceStatus
from shoal.core import (
    SLO,
    Client,
    EngineDied,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    Service,
    ServiceUnavailable,
    TokenEvent,
    TokenLogprobs,
    derive_seed,
)
from shoal.core.service import NO_GOALS
from shoal.engine.info import ServiceInfo
from shoal.engine.process_usage import DeviceUsage, ProcessUsage
from shoal.engine.stats import EngineStats, PoolStats, ServiceStats, StepTotals
from shoal.frontend.choice_requests import expand_choices
from shoal.frontend.reader import ChoiceReader
from shoal.frontend.stream import Stream
from shoal.frontend.validation import check_priority, check_request
from shoal.models.chat_template.template import ChatTemplate
from shoal.serve import ServerOptions, StopSignal, create_app, serve_until_stopped
from shoal.serve.cpu_workers import Workers
from shoal.serve.generation import Generation, GenerationRequest, submit_request
from shoal.serve.metrics.server_metrics import ServerMetrics

EOS, BOS, FIRST_BYTE = 0, 1, 2
VOCAB = 258
BASE = "base"
# The first service has goals that every request meets, the second has none.
SERVICES = (
    Service(name="chat", model="fake-chat", slo=SLO(ttft_s=600, e2e_scale=60), execution_s=10),
    Service(name=BASE, model="fake-base"),
)


class ByteTokenizer(InlineCodec):
    """One token for each byte of UTF-8; ``encode`` adds a BOS token. The text of special tokens is <id>."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)
    bos_token_id = BOS

    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"

    def __init__(self, has_chat_template: bool = True, template: str | None = None) -> None:
        self.has_chat_template = has_chat_template
        self.template = template or self.template
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return [BOS] * add_special_tokens + [byte + FIRST_BYTE for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token - FIRST_BYTE]) if token >= FIRST_BYTE else b""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces = [
            self.token_bytes(token) or (b"" if skip_special_tokens else f"<{token}>".encode())
            for token in tokens
        ]
        return b"".join(pieces).decode("utf-8", "replace")

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def special_token(self, text: str) -> int | None:
        return None

    @property
    def chat_template(self) -> ChatTemplate:
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat_template", param="messages")
        return ChatTemplate(self.template, {})


class InlineWorkers:
    """Runs tasks in this process rather than in worker processes."""

    async def run(self, queue: str, task: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def make_tokenizers() -> dict[str, ByteTokenizer]:
    return {"chat": ByteTokenizer(), "base": ByteTokenizer(has_chat_template=False)}


@dataclass
class FakeEngine:
    """Acts as one engine: greedy output repeats the prompt's text, sampled output is letters by seed."""

    context: int = 200
    max_queue: int = 8
    fail_after: int | None = None
    """The engine dies after this many tokens of a request."""
    error_after: int | None = None
    """A request fails after this many tokens, with ``error_finish``."""
    error_finish: FinishReason = FinishReason.ERROR
    says: str | None = None
    """The greedy output, instead of the prompt."""
    alive: bool = True
    others: Sequence[EngineStatus] = ()
    """Status of more engines."""
    services: Mapping[str, ServiceStatus] = field(
        default_factory=lambda: {
            service.name: ServiceStatus(ready=1, wanted=1, waiting=0) for service in SERVICES
        }
    )
    failure: Exception | None = None
    """Ends requests after ``fail_after`` tokens; None: the engine dies."""
    administration: Any = None
    """Changes it, in tests of that."""
    log_names: list[str | None] = field(default_factory=list)
    clients: list[Client | None] = field(default_factory=list)
    hold: asyncio.Event | None = None
    """Requests wait for it before the token at position ``pause_at``."""
    pause_at: int = 0
    paused: int = 0
    """Number of requests that have reached ``pause_at``."""
    waking: set[str] = field(default_factory=set)
    """Services that are being loaded."""
    load_ns: int = 0
    """The load time that requests report."""
    submitted: list[Request] = field(default_factory=list)
    takes_priorities: bool = False
    cancelled: list[str] = field(default_factory=list)
    waiting: int = 0
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    decoder: ByteTokenizer = field(default_factory=ByteTokenizer)
    table: RequestTable = field(default_factory=lambda: RequestTable([], [], 0))
    placing: PlacingStatus = field(default_factory=lambda: PlacingStatus("fixed"))

    def requests(self, most: int, services: Set[str] | None = None) -> RequestTable:
        """Those that ``table`` leaves out are of services that are not asked for."""
        if services is None:
            return self.table
        of = [[each for each in part if each.service in services] for part in self.table[:2]]
        return RequestTable(*of, left_out=0)

    @property
    def info(self) -> ClusterInfo:
        limits = {
            service.name: ServiceInfo(
                model=service.model,
                context_tokens=self.context,
                max_total_tokens=self.context,
                kv_tokens=1024,
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                execution_s=service.execution_s,
            )
            for service in SERVICES
        }
        return ClusterInfo(
            services=limits, takes_priorities=self.takes_priorities, kernels="torch only", device="cpu"
        )

    @property
    def engines(self) -> Sequence[EngineStatus]:
        own = EngineStatus(
            name="0",
            state=EngineState.READY if self.alive else EngineState.WAITING,
            services=tuple(service.name for service in SERVICES),
            device="cpu",
            pid=4321 if self.alive else None,
            restarts=2,
            requests=self.waiting,
            heartbeat_age_s=0.25,
            last_error=None if self.alive else "killed by signal 9",
            stats=self._stats(),
            stats_age_s=0.5,
        )
        return [own, *self.others]

    @property
    def wanted_engines(self) -> int:
        return sum(engine.active for engine in self.engines)

    def waits_for_load(self, service: str) -> bool:
        return service in self.waking

    @property
    def unfinished(self) -> int:
        return self.waiting

    def die(self) -> None:
        self.alive = False
        self.services = {name: replace(service, ready=0) for name, service in self.services.items()}

    async def submit(
        self,
        service: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        slo: SLO = NO_GOALS,
        arrival_ns: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        log_name: str | None = None,
        client: Client | None = None,
    ) -> Stream:
        self.log_names.append(log_name)
        self.clients.append(client)
        if not self.alive:
            raise ServiceUnavailable(f"no engine of {service!r} runs", retry_after_s=4.2)
        check_request(self.info, service, prompt, sampling, slo)
        check_priority(self.info, priority)
        if self.waiting and self.waiting + sampling.n > self.max_queue:
            raise QueueFull(f"{self.waiting} requests wait already", retry_after_s=2.4)
        self.waiting += sampling.n
        requests = expand_choices(
            f"request-{len(self.submitted)}",
            service,
            list(prompt),
            sampling,
            arrival_ns or 0,
            slo,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.submitted += requests
        stream = Stream(f"request-{len(self.submitted)}", len(prompt), lambda: self._abandon(task, requests))
        stream.load_ns = self.load_ns
        task = asyncio.create_task(self._run(stream, requests, sampling))
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, sampling.n))
        return stream

    def _done(self, task: "asyncio.Task[None]", choices: int) -> None:
        self.tasks.discard(task)
        self.waiting -= choices

    def _abandon(self, task: "asyncio.Task[None]", requests: Sequence[Request]) -> None:
        self.cancelled += [request.id for request in requests]
        task.cancel()

    async def _run(self, stream: Stream, requests: Sequence[Request], sampling: SamplingParams) -> None:
        readers = {
            choice: ChoiceReader(request, choice, sampling, self.decoder)
            for choice, request in enumerate(requests)
        }
        position = 0
        while readers:
            if self.hold is not None and position == self.pause_at:
                self.paused += 1
                await self.hold.wait()
            if position == self.fail_after:
                if self.failure is None:
                    self.die()
                stream.end(self.failure or EngineDied("the engine process ended (killed by signal 9)"))
                return
            for choice, reader in list(readers.items()):
                event = self._event(requests[choice], position)
                delta = reader.read(event, 0)
                stream.push(delta)
                if delta.finish is not None:
                    del readers[choice]
            position += 1
            await asyncio.sleep(0)
        stream.end()

    def _event(self, request: Request, position: int) -> TokenEvent:
        if position == self.error_after:
            return TokenEvent(request.id, finish=self.error_finish, error="NaN in the logits")
        sampling = request.sampling
        token = self._token(request, position)
        stop = token if token in (EOS, *sampling.stop_token_ids) and not sampling.ignore_eos else None
        longest_output = self.context - len(request.prompt)
        last = position + 1 >= min(sampling.max_tokens or longest_output, longest_output)
        logprobs = None
        if sampling.logprobs is not None:
            likeliest = [(token, -0.5), *((other, -2.0) for other in range(100, 130))]
            logprobs = (TokenLogprobs(token, -0.5, tuple(likeliest[: sampling.logprobs])),)
        finish = FinishReason.STOP if stop is not None else FinishReason.LENGTH if last else None
        event = TokenEvent(request.id, (token,), logprobs, finish, stop, None, cached_tokens=1)
        return event if position else event._replace(**self._prompt_outputs(request))

    def _prompt_outputs(self, request: Request) -> dict[str, Any]:
        """Each prompt token has rank 2, after the token with the next id; an embedding has its length."""
        outputs: dict[str, Any] = {}
        count = request.sampling.prompt_logprobs
        if count is not None:
            outputs["prompt_logprobs"] = tuple(
                TokenLogprobs(token, -1.5, ((token + 1, -0.25), (token, -1.5))[:count], rank=2)
                for token in request.prompt[1:]
            )
        if request.sampling.embed:
            outputs["embedding"] = struct.pack("<3f", 0.0, 0.5, len(request.prompt))
        return outputs

    def _token(self, request: Request, position: int) -> int:
        prompt = [token for token in request.prompt if token >= FIRST_BYTE]
        if request.sampling.temperature > 0:
            return FIRST_BYTE + ord("a") + derive_seed(request.seed, position) % 26
        if self.says is not None:
            prompt = ByteTokenizer().encode(self.says, add_special_tokens=False)
        if position < len(prompt):
            return prompt[position]
        return FIRST_BYTE + ord("z") if request.sampling.ignore_eos else EOS

    def _stats(self) -> EngineStats:
        service = ServiceStats(
            waiting=self.waiting,
            running=2,
            swapped=4,
            preemptions=3,
            swapped_tokens=60,
            compacted_blocks=5,
            prompt_tokens=40,
            output_tokens=50,
        )
        pool = PoolStats(
            total_bytes=1000,
            live_bytes=250,
            cached_bytes=100,
            padding_bytes=5,
            unfilled_bytes=15,
            external_bytes=20,
            merged_blocks=10,
            free_merged_blocks=4,
        )
        return EngineStats(
            services={"chat": service, "base": ServiceStats()},
            pool=pool,
            steps=StepTotals(count=7),
            usage=ProcessUsage(
                cpu_s=12.5,
                rss_bytes=3 << 30,
                device=DeviceUsage(utilisation=0.5, memory_bytes=9 << 30, power_w=300.0),
            ),
        )


def make_app(engine: FakeEngine | None = None, template: str | None = None, **options: Any) -> FastAPI:
    engine = engine or FakeEngine()
    tokenizers = make_tokenizers() | {"chat": ByteTokenizer(template=template)}
    return create_app(engine, tokenizers, SERVICES, ServerOptions(**options), workers=InlineWorkers())


def make_client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def post(path: str, body: Any, engine: FakeEngine | None = None, **options: Any) -> httpx.Response:
    """One POST to a new app; bytes are sent as they are."""
    async with make_client(make_app(engine, **options)) as client:
        if isinstance(body, bytes):
            return await client.post(path, content=body, headers={"Content-Type": "application/json"})
        return await client.post(path, json=body)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": "hello world", "temperature": 0} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "temperature": 0} | fields


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def events(text: str) -> list[Any]:
    """The payloads of a stream of server-sent events; JSON is parsed."""
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def generation(
    engine: FakeEngine, prompts: Sequence[str], **fields: Any
) -> AbstractAsyncContextManager[Generation]:
    """A running generation request for ``prompts``, below HTTP."""
    tokens = [ByteTokenizer().encode(prompt) for prompt in prompts]
    request = GenerationRequest(
        id="c", service=BASE, prompts=tokens, sampling=SamplingParams(**fields), arrival_ns=0
    )
    return submit_request(engine, request, ServerMetrics(SERVICES))


@asynccontextmanager
async def serving(
    engine: FakeEngine, workers: Workers | None = None, **options: Any
) -> AsyncIterator[tuple[str, StopSignal, Any]]:
    """A real server on a loopback port: (base URL, stop signal, its task)."""
    stop = StopSignal()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve_until_stopped(
            engine,
            make_tokenizers(),
            SERVICES,
            ServerOptions(port=0, **options),
            stop,
            ready.set_result,
            workers or InlineWorkers(),
        )
    )
    try:
        yield await asyncio.wait_for(ready, 60), stop, task
    finally:
        stop.request()
        stop.request()
        with suppress(asyncio.CancelledError):
            await task


@contextmanager
def serving_in_thread(engine: FakeEngine, **options: Any) -> Iterator[str]:
    """A real server in a thread, for clients that block."""
    begun = threading.Event()
    state: dict[str, Any] = {}

    async def main() -> None:
        async with serving(engine, **options) as (url, stop, task):
            state.update(url=url, stop=stop, loop=asyncio.get_running_loop())
            begun.set()
            await asyncio.wait((task,))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert begun.wait(60)
        yield state["url"]
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].request)
        thread.join(60)
        assert not thread.is_alive()


async def until(condition: Any) -> None:
    """Wait until a condition becomes true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
