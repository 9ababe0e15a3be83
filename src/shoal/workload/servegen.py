"""Trace format: ServeGen's clients (Xiang et al., 2025), with rates and length distributions to draw from.

A folder has for every client N ``chunk-N-trace.csv``, with a line ``t,rate,cv,pattern,p1,p2`` for each window
of 600 s (inter-arrival times follow the pattern, Gamma or Weibull, with shape p1 and scale p2), and
``chunk-N-dataset.json`` with distributions of input and output lengths for longer windows. Multimodal clients
have tokens of text, images, audio and video instead of the input's.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core import ConfigError, derive_seed
from shoal.workload.lines import (
    LARGEST_COUNT,
    LARGEST_LENGTH,
    ReadOptions,
    csv_lines,
    line_error,
    open_text,
    parse_float,
)
from shoal.workload.rows import TraceRow

WINDOW_S = 600
_COLUMNS = "t,rate,cv,pattern,p1,p2"
_MODALITIES = ("text_tokens", "image_tokens", "audio_tokens", "video_tokens")
_CLIENT = re.compile(r"chunk-(\d+)-trace\.csv")
_KEY = re.compile(r"([0-9.]+)\s*:")


@dataclass(frozen=True, slots=True)
class _Window:
    """Traffic of one client in one window."""

    requests: int
    weibull: bool
    """Whether inter-arrival times are Weibull-distributed; otherwise Gamma."""
    shape: float
    """Shape parameter of inter-arrival times."""


@dataclass(frozen=True, slots=True)
class _Client:
    number: int
    """N in its file names."""
    windows: dict[int, _Window]
    """Windows with requests, by start in seconds."""
    lengths: "_Lengths"


def is_servegen(path: Path) -> bool:
    """Whether a folder has ServeGen's clients."""
    return path.is_dir() and any(_CLIENT.fullmatch(child.name) for child in path.iterdir())


def read_servegen(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests of all clients, window by window.

    The number of requests in a window is exactly its rate times its length; inter-arrival times have the
    window's shape and are scaled to fill it. Input and output lengths are independent, since the data has no
    correlations. Draws depend on seed, client and window.
    """
    found = sorted(
        int(match[1]) for child in path.iterdir() if (match := _CLIENT.fullmatch(child.name)) is not None
    )
    if not found:
        raise ConfigError(f"{path}: no chunk-N-trace.csv; expected a folder of ServeGen's clients")
    clients = [_read_client(path, number) for number in found]
    for start in sorted({start for client in clients for start in client.windows}):
        busy = [client for client in clients if start in client.windows]
        draws = [_draw(client, start, options.seed) for client in busy]
        times, prompts, outputs = (np.concatenate(parts) for parts in zip(*draws, strict=True))
        names = np.repeat([client.number for client in busy], [len(draw[0]) for draw in draws])
        order = np.argsort(times, kind="stable")
        columns = (column[order].tolist() for column in (times, prompts, outputs, names))
        for time, prompt, output, number in zip(*columns, strict=True):
            yield TraceRow(time, prompt, output, f"chunk-{number}")


def _draw(client: _Client, start: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    window = client.windows[start]
    rng = np.random.default_rng(derive_seed(seed, client.number, start))
    size = window.requests + 1
    intervals = rng.weibull(window.shape, size) if window.weibull else rng.gamma(window.shape, 1.0, size)
    ends = np.cumsum(intervals)
    window_ns = WINDOW_S * 10**9
    offsets = (ends[:-1] / max(ends[-1], 1e-300) * window_ns).astype(np.int64)
    times = start * 10**9 + np.minimum(offsets, window_ns - 1)
    prompts, outputs = client.lengths.at(start)
    parts = [part.draw(rng, window.requests) for part in prompts]
    # Each modality may have length 0; a prompt has at least one token.
    return times, np.maximum(np.sum(parts, axis=0), 1), outputs.draw(rng, window.requests)


def _read_client(folder: Path, number: int) -> _Client:
    path = folder / f"chunk-{number}-trace.csv"
    windows: dict[int, _Window] = {}
    for line, cells in csv_lines(path):
        if len(cells) != 6:
            raise line_error(path, line, f"{len(cells)} columns", f"6: {_COLUMNS}")
        start = int(parse_float(cells[0], "t", path, line, least=0.0))
        requests = round(parse_float(cells[1], "rate", path, line, 0.0, LARGEST_COUNT / WINDOW_S) * WINDOW_S)
        pattern = cells[3].strip()
        if pattern not in {"", "Gamma", "Weibull"}:
            raise line_error(path, line, f"pattern is {pattern[:80]!r}", "Gamma or Weibull")
        # Windows with too few requests have no pattern; they are taken as Poisson processes.
        shape = parse_float(cells[4], "p1", path, line, least=1e-3) if pattern and requests else 1.0
        if requests:
            windows[start] = _Window(requests, pattern == "Weibull", shape)
    return _Client(number, windows, _Lengths(folder / f"chunk-{number}-dataset.json"))


@dataclass(frozen=True, slots=True)
class _Histogram:
    lengths: NDArray[np.int64]
    cumulative: NDArray[np.float64]
    """Cumulative probabilities of ``lengths``."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return self.lengths[np.searchsorted(self.cumulative, rng.random(count), side="right")]


class _Lengths:
    """The length distributions of one client; the file is read on first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: dict[str, Any] = {}
        self._starts: list[int] = []
        self._read: dict[int, tuple[list[_Histogram], _Histogram]] = {}

    def at(self, start: int) -> tuple[list[_Histogram], _Histogram]:
        """Distributions at a time in seconds: of each modality of prompts, and of outputs."""
        if not self._raw:
            self._load()
        index = bisect_right(self._starts, start) - 1
        key = self._starts[max(index, 0)]
        if key not in self._read:
            window = self._raw[str(key)]
            sides = [name for name in _MODALITIES if isinstance(window, dict) and name in window]
            if not sides or "input_tokens" in window:
                prompts = [self._histogram(key, "input_tokens")]
            else:
                prompts = [self._histogram(key, name, least=0) for name in sides]
            self._read[key] = prompts, self._histogram(key, "output_tokens")
        return self._read[key]

    def _load(self) -> None:
        try:
            with open_text(self._path) as file:
                raw = json.load(file)
            self._raw = {str(int(key)): value for key, value in raw.items()}
        except json.JSONDecodeError as error:
            raise line_error(
                self._path, error.lineno, f"not JSON ({error.msg})", "lengths by window"
            ) from None
        except (ValueError, AttributeError, RecursionError):
            raise line_error(self._path, 1, "no object of windows", '{"0": {"input_tokens": ...}}') from None
        self._starts = sorted(int(key) for key in self._raw)
        if not self._starts:
            raise line_error(self._path, 1, "no windows", '{"0": {"input_tokens": ...}}')

    def _histogram(self, key: int, side: str, least: int = 1) -> _Histogram:
        """Read a distribution, which is a Python dictionary in a JSON string."""
        try:
            shares = json.loads(_KEY.sub(r'"\1":', self._raw[str(key)][side]))
            lengths = np.array([int(float(length)) for length in shares], dtype=np.int64)
            weights = np.array(list(shares.values()), dtype=np.float64)
            if not len(lengths) or lengths.min() < least or lengths.max() > LARGEST_LENGTH:
                raise ValueError
            if weights.min() < 0 or not 0 < weights.sum() < np.inf:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            wrong = f"window {key} has requests but no distribution {side!r}"
            limits = f"lengths from {least} to {LARGEST_LENGTH}"
            raise line_error(self._path, 1, wrong, f'"{{45: 0.25, 46: 0.75}}", {limits}') from None
        cumulative = np.cumsum(weights)
        # The last is exactly 1, so that rounding leaves no draw without a length.
        cumulative = np.append(cumulative[:-1] / cumulative[-1], 1.0)
        return _Histogram(lengths, cumulative)
