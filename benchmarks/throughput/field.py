"""The set of contestants of `benchmarks.throughput`: Shoal offline and over HTTP, and its peers."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.throughput.contestants import Contestant, Pair, Runner
from benchmarks.throughput.http_contestant import Served
from benchmarks.throughput.weight_files import original_file, q8_0_file, twin_folder, weights_of
from shoal.models import resolve_model

# Libraries that vLLM recommends to preload, in the `lib` of its virtual environment.
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
_KV_OF = {"int8": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Field:
    """Settings of all contestants.

    largest: `streams`, `request_tokens` and `job_tokens` of the setup. peers: interpreters by name.
    kv_gib: KV memory of a contestant.
    """

    model: str
    dtypes: Sequence[str]
    device: str
    layout: str
    kv_gib: int
    peers: Mapping[str, str]
    largest: Mapping[str, int]

    def with_one_model(self, *, http: bool) -> Iterator[Contestant]:
        """Contestants with all cores; Shoal offline first."""
        for dtype in self.dtypes:
            yield self._shoal(f"Shoal {dtype}", dtype, [self.model])
        if http:
            yield from map(self._served, self.dtypes)
        if "vllm" in self.peers:
            yield self._vllm()
        if "openvino" in self.peers:
            yield self._gguf("OpenVINO, as pulled", "openvino", original_file)
            yield self._gguf("OpenVINO, 8 bits", "openvino", q8_0_file)
        if "llamacpp" in self.peers:
            yield self._gguf("llama.cpp, 8 bits", "llamacpp", q8_0_file)

    def with_two_models(self) -> Iterator[Contestant]:
        """One engine with two models, and two processes with half of the cores and of the KV each."""
        cores = sorted(os.sched_getaffinity(0))
        halves = cores[: len(cores) // 2], cores[len(cores) // 2 :]
        for dtype in self.dtypes:
            yield self._shoal(f"Shoal {dtype}", dtype, [self.model, str(twin_folder(self.model))])
        for dtype in self.dtypes:
            name = f"Shoal {dtype}, two processes"
            yield Pair(name, *(self._shoal(name, dtype, [self.model], half) for half in halves))
        if "openvino" in self.peers:
            for what, file in (("as pulled", original_file), ("8 bits", q8_0_file)):
                name = f"OpenVINO, {what}, two processes"
                yield Pair(name, *(self._gguf(name, "openvino", file, half) for half in halves))

    def _shoal(self, name: str, dtype: str, models: Sequence[str], cores: Collection[int] = ()) -> Runner:
        kv_cache = {**self._kv_cache(), "memory_bytes": self._kv_gib(cores) << 30}
        setup = {"models": models, "dtype": dtype, "device": self.device, "kv_cache": kv_cache}
        facts = self._facts(dtype)
        return Runner(name, sys.executable, "shoal_engine", lambda: {**setup, **facts}, cores=cores)

    def _served(self, dtype: str) -> Served:
        config = {
            "devices": [self.device],
            "kv_cache": {**self._kv_cache(), "memory": f"{self.kv_gib}GiB"},
            "services": [{"name": "bench", "model": self.model, "dtype": dtype}],
        }
        return Served(f"Shoal {dtype}, HTTP", config, self._facts(dtype))

    def _facts(self, dtype: str) -> Mapping[str, str]:
        return {"weights": dtype, "kv": _KV_OF.get(dtype, dtype)}

    def _kv_cache(self) -> Mapping[str, Any]:
        return {"layout": self.layout}

    def _kv_gib(self, cores: Collection[int]) -> int:
        return max(1, self.kv_gib // 2) if cores else self.kv_gib

    def _vllm(self) -> Runner:
        python = self.peers["vllm"]
        libraries = [Path(python).parent.parent / "lib" / name for name in _PRELOADED]
        preload = ":".join(str(library) for library in libraries if library.exists())

        def setup() -> Mapping[str, Any]:
            folder = str(resolve_model(self.model))
            return {**self.largest, "model": folder, "weights": "bfloat16", "kv_gib": self.kv_gib}

        return Runner("vLLM", python, "vllm_engine", setup, environment={"LD_PRELOAD": preload})

    def _gguf(self, name: str, peer: str, find: Callable[[str], Path], cores: Collection[int] = ()) -> Runner:
        """A peer that reads GGUF files."""

        def setup() -> Mapping[str, Any]:
            file = find(self.model)
            model = {"model": str(file), "weights": weights_of(file)}
            return {**self.largest, **model, "kv_gib": self._kv_gib(cores)}

        return Runner(name, self.peers[peer], f"{peer}_engine", setup, cores=cores)
