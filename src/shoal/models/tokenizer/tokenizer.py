"""Tokenizer: text to tokens and back, and conversations to prompts, without torch or transformers."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from shoal.core import ConfigError, InvalidRequest
from shoal.models.chat_template.files import DEFAULT, TOOL_USE, read_templates
from shoal.models.chat_template.template import ChatTemplate
from shoal.models.conversion.run_conversion import tokenizer_folder
from shoal.models.folder.file_results import digest_of
from shoal.models.folder.json_files import read_json
from shoal.models.progress import silent
from shoal.models.tokenizer.added_tokens import TOKENIZER_FILE, special_tokens
from shoal.models.tokenizer.end_tokens import end_token_ids
from shoal.models.tokenizer.load import load_backend, state_of
from shoal.models.tokenizer.token_bytes import BYTES_OF_PIECE, TokenAlphabet, alphabet_of, never_shortens

NO_CHAT_TEMPLATE = "no_chat_template"
"""Error code for conversations with a model that has no chat template."""


@dataclass(frozen=True, slots=True)
class TokenizerDescription:
    """Facts about a model's tokenizer that can be read quickly, without the vocabulary."""

    file: Path
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    prepend_bos: bool
    """Texts begin with the ``bos_token``, even if the tokenizer itself does not prepend it."""
    template: ChatTemplate | None

    @classmethod
    def read(cls, folder: Path, chat_template: str | None = None) -> Self:
        """Read it for the model in ``folder``; arguments and errors are those of
        ``Tokenizer.from_folder``."""
        files = tokenizer_folder(folder, silent)
        special = special_tokens(files)
        return cls(
            file=files / TOKENIZER_FILE,
            special_tokens=special,
            eos_token_ids=end_token_ids(folder, files),
            prepend_bos=read_json(files / "tokenizer_config.json").get("add_bos_token") is True,
            template=_template((folder, files), special, chat_template),
        )


class WithChatTemplate:
    """Base class of objects with an optional chat template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises InvalidRequest if there is none."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot chat: use completions, or set"
                " chat_template on its service",
                param="chat_template",
                code=NO_CHAT_TEMPLATE,
            )
        return self._template


class Tokenizer(WithChatTemplate):
    """A model's tokenizer and chat template; immutable, and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        prepend_bos: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        super().__init__(template)
        self._backend = backend
        self._alphabet = alphabet_of(state_of(backend.decoder))
        self._bytes_of = BYTES_OF_PIECE[self._alphabet]
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Size of the vocabulary with added tokens; a model's embedding may have more rows."""
        self.eos_token_ids = eos_token_ids
        bos = special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        """Token that begins a text; None if the model has none."""
        # If the tokenizer itself prepends a token, that is used, even if the configuration names another.
        first, plain = (backend.encode("a", add_special_tokens=special).ids[:1] for special in (True, False))
        self._prepend_bos = prepend_bos and self.bos_token_id is not None and first == plain

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        chat_template: str | None = None,
        loaded: MutableMapping[str, tokenizers.Tokenizer] | None = None,
    ) -> "Tokenizer":
        """The tokenizer of the model in ``folder`` (as ``resolve_model`` returns it).

        chat_template: Jinja source that replaces the model's own. loaded: loaded tokenizers by the digest of
        their file, which models share. Raises ConfigError if the template is not valid Jinja,
        ModelUnavailable or ModelUnsupported if the folder has no usable tokenizer.
        """
        described = TokenizerDescription.read(folder, chat_template)
        loaded = {} if loaded is None else loaded
        digest = digest_of(described.file)
        if digest not in loaded:
            loaded[digest] = load_backend(described.file)
        return cls(
            loaded[digest],
            special_tokens=described.special_tokens,
            eos_token_ids=described.eos_token_ids,
            prepend_bos=described.prepend_bos,
            template=described.template,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; add_special_tokens: add tokens at the beginning and end as in training.

        Raises InvalidRequest for a text with lone surrogates, which cannot be encoded in UTF-8.
        """
        check_utf8(text)
        # Unlike the library's ``encode``, the batch call releases the GIL.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._prepend_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``, cheap to compute; 0 if none is known."""
        return len(text.encode(errors="replace")) // self._longest_token_bytes if self._keeps_text else 0

    @cached_property
    def _longest_token_bytes(self) -> int:
        return max((len(self._bytes_of(piece)) for piece in self._backend.get_vocab()), default=1) or 1

    @cached_property
    def _keeps_text(self) -> bool:
        """Whether every byte of a text is in one of its tokens.

        Normalizers may drop text, special tokens may include blanks around them, and a vocabulary without all
        bytes encodes many characters as one unknown token.
        """
        added = self._backend.get_added_tokens_decoder().values()
        knows_all_bytes = self._alphabet is TokenAlphabet.BYTE_LEVEL or (
            self._alphabet is TokenAlphabet.PIECES and getattr(self._backend.model, "byte_fallback", False)
        )
        return (
            knows_all_bytes
            and never_shortens(state_of(self._backend.normalizer))
            and not any(token.lstrip or token.rstrip for token in added)
        )

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``tokens``; bytes that are not valid UTF-8 (yet) become U+FFFD, unknown ids nothing."""
        # A batch call, as in ``encode``.
        texts: list[str] = self._backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; empty for an id outside the vocabulary."""
        piece = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        return self._bytes_of(piece) if piece is not None else b""

    def special_token(self, text: str) -> int | None:
        """The id of the special token ``text``; None if there is none."""
        token: int | None = self._backend.token_to_id(text)
        added = None if token is None else self._backend.get_added_tokens_decoder().get(token)
        return token if added is not None and added.special else None

    def token_text(self, token: int) -> str:
        """``token_bytes`` as text; incomplete characters become U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to the beginning of the assistant's answer.

        Raises InvalidRequest if the messages are malformed, the template rejects them, or there is no
        template.
        """
        # The template itself writes all special tokens.
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)


def check_utf8(text: str) -> None:
    """Raise InvalidRequest for a text with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"not UTF-8 text: character {error.start + 1} is the lone surrogate {text[error.start]!r}"
        ) from error


def _template(
    folders: Sequence[Path], special_tokens: Mapping[str, str], given: str | None
) -> ChatTemplate | None:
    """The ``given`` template, else the model's own; None if there is none."""
    if given:
        template = ChatTemplate(given, special_tokens)
        try:
            template.check_syntax()
        except InvalidRequest as error:
            raise ConfigError(f"chat_template: {error}") from error
        return template
    own = read_templates(folders)
    source = own.get(DEFAULT, own.get(TOOL_USE))
    return None if source is None else ChatTemplate(source, special_tokens, own.get(TOOL_USE))
