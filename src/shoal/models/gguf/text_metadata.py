"""End tokens and chat templates of a GGUF file that transformers' tokenizer conversion omits."""

import json
import re
from pathlib import Path
from typing import Any

from shoal.models.folder.json_files import read_json

# End of text, of a message, and of a message with a tool call.
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_TEMPLATE = re.compile(r"tokenizer\.chat_template\.([\w-]+)")


def keep_text_metadata(reader: Any, folder: Path) -> None:
    """Write all end tokens and named chat templates of the reader's file to ``folder``."""
    ends = [int(field.contents()) for name in _ENDS if (field := reader.fields.get(name)) is not None]
    if ends:
        file = folder / "generation_config.json"
        config = read_json(file) | {"eos_token_id": list(dict.fromkeys(ends))}
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    templates = folder / "additional_chat_templates"
    for name, field in reader.fields.items():
        if named := _TEMPLATE.fullmatch(name):
            templates.mkdir(exist_ok=True)
            (templates / f"{named[1]}.jinja").write_text(field.contents(), encoding="utf-8")
