"""The tokenizer process, which encodes for a server; ``python -m shoal.models.tokenizer.process DESCRIPTOR``.

Loading a tokenizer holds the GIL for seconds, and so do encoding and serialising megabytes of tokens. So a
server runs a process for each tokenizer, and only keeps the ``Vocabulary`` for detokenization.
"""

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.core import ShoalError
from shoal.models.folder.file_results import digest_of
from shoal.models.tokenizer.encoding import encode_texts, tokenize
from shoal.models.tokenizer.load import load_backend
from shoal.models.tokenizer.messages import (
    HEADER,
    SHORT_BYTES,
    Decode,
    Decoded,
    Encode,
    Failed,
    Load,
    Loaded,
    Tokenize,
    TokenizerReply,
    TokenizerRequest,
    decode_request,
    encode,
)
from shoal.models.tokenizer.tokenizer import Tokenizer
from shoal.models.tokenizer.vocabulary import Vocabulary

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Process:
    """Serves requests from ``channel``: short ones immediately, long ones each in a thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def run(self) -> None:
        """Serve until the other end is closed."""
        with self._channel.makefile("rb") as source:
            while (frame := _read(source)) is not None:
                number, message = frame
                if len(message) <= SHORT_BYTES:
                    self._serve_request(number, message)
                else:
                    threading.Thread(target=self._serve_request, args=frame, daemon=True).start()

    def _serve_request(self, number: int, message: bytes) -> None:
        try:
            answer = encode(self._handle(decode_request(message)))
        except BaseException as error:  # the library may panic, which is not an Exception
            kind = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
            answer = encode(Failed(f"{kind}{error!s:.1000}"))
        with self._sending, suppress(ConnectionError):  # the server has ended, and this process will end, too
            self._channel.sendall(HEADER.pack(number, len(answer)))
            self._channel.sendall(answer)
        if len(message) > SHORT_BYTES:
            _free_memory()

    def _handle(self, request: TokenizerRequest) -> TokenizerReply:
        if isinstance(request, Load):
            return self._load(request)
        tokenizer = self._tokenizer
        assert tokenizer is not None, "the first request is Load"
        match request:
            case Encode():
                return encode_texts(tokenizer, request.texts, request.add_special_tokens, request.most_tokens)
            case Tokenize():
                return tokenize(tokenizer, request.text, request.add_special_tokens, request.with_strings)
            case Decode():
                return Decoded(tokenizer.decode(request.tokens, skip_special_tokens=False))

    def _load(self, load: Load) -> TokenizerReply:
        file = Path(load.file)
        if digest_of(file) != load.digest:
            return Failed(f"{file} has been replaced since it was first read")
        backend = load_backend(file)
        self._tokenizer = Tokenizer(
            backend,
            special_tokens={} if load.bos_token is None else {"bos_token": load.bos_token},
            eos_token_ids=(),
            prepend_bos=load.bos_token is not None,
        )
        self._tokenizer.least_tokens("")  # reads the vocabulary now, not with the first text
        vocabulary = pickle.dumps(Vocabulary.of(backend))
        _free_memory()
        return Loaded(vocabulary)


def _free_memory() -> None:
    """Return free memory to the system: more than half of what loading a tokenizer takes is temporary."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _read(source: IO[bytes]) -> tuple[int, bytes] | None:
    """Number and message of the next request; None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    number, length = HEADER.unpack(header)
    message = source.read(length)
    return (number, message) if len(message) == length else None


def main() -> None:
    """Serve the inherited socket whose descriptor is the argument."""
    for number in _SIGNALS:  # the process ends with its server instead
        signal.signal(number, signal.SIG_IGN)
    with suppress(ConnectionError):
        _Process(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main()
