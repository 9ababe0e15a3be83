"""Model files: names, downloads, conversion, tokenizers, chat templates, and facts from config files.

This room resolves a model's name to a folder, pulls and converts models, loads tokenizers and chat
templates, and reads facts of an architecture without loading it (context length, KV shape of each layer). It
also rejects models by their files alone. Weights as tensors and the forward pass are in ``execute``.
Importing this package imports neither torch nor transformers; conversions use them in a subprocess.
"""

from shoal.models.cache import cache_dir
from shoal.models.conversion.run_conversion import has_tokenizer
from shoal.models.folder.checks import check_config, check_weights
from shoal.models.folder.context_length import context_tokens
from shoal.models.folder.description import ModelDescription, describe_model, describe_random_model
from shoal.models.folder.facts import LayerFacts, ModelFacts, read_facts
from shoal.models.folder.file_results import digest_of
from shoal.models.folder.generation_config import advised_sampling, read_sampling_defaults
from shoal.models.folder.weights import (
    derived_folder,
    groups_file,
    is_quantised,
    open_weights,
    refuse_incomplete,
    summarize_names,
    weight_files,
)
from shoal.models.listing import ModelInfo, list_models
from shoal.models.progress import Progress, in_words
from shoal.models.quantised.assemble import QuantisedTensor
from shoal.models.quantised.config import stated_quantisation
from shoal.models.quantised.scheme import Scheme, Storage
from shoal.models.quantised.tensors import keeps_integers, read_quantised, read_weight_headers
from shoal.models.resolve import check_model, pull_model, resolve_model
from shoal.models.services import check_service, resolve_service
from shoal.models.tokenizer.no_tokenizer import NoTokenizer
from shoal.models.tokenizer.tokenizer import NO_CHAT_TEMPLATE, Tokenizer, TokenizerDescription
from shoal.models.tokenizer.vocabulary import Vocabulary
from shoal.models.tokenizer.word_tokens import word_tokens
from shoal.models.weight_images import FACTS_FILE, StoredImage, images_dir, list_images, remove_orphans

__all__ = [
    "FACTS_FILE",
    "NO_CHAT_TEMPLATE",
    "LayerFacts",
    "ModelDescription",
    "ModelFacts",
    "ModelInfo",
    "NoTokenizer",
    "Progress",
    "QuantisedTensor",
    "Scheme",
    "Storage",
    "StoredImage",
    "Tokenizer",
    "TokenizerDescription",
    "Vocabulary",
    "advised_sampling",
    "cache_dir",
    "check_config",
    "check_weights",
    "check_model",
    "check_service",
    "context_tokens",
    "derived_folder",
    "describe_model",
    "describe_random_model",
    "digest_of",
    "groups_file",
    "has_tokenizer",
    "images_dir",
    "in_words",
    "is_quantised",
    "keeps_integers",
    "list_images",
    "list_models",
    "open_weights",
    "pull_model",
    "read_facts",
    "read_quantised",
    "read_sampling_defaults",
    "read_weight_headers",
    "refuse_incomplete",
    "stated_quantisation",
    "remove_orphans",
    "summarize_names",
    "resolve_model",
    "resolve_service",
    "weight_files",
    "word_tokens",
]
