"""Copy the files next to the weights from a model's folder to the export's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from tandem.config.model import ModelConfig
from tandem.models.ends import GENERATION, declared_ends
from tandem.texts import parse_json

_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# Not copied: weights in any format, their indexes, a trainer's own files, adapters of a model, and locks.
_LEFT = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx*"),
    *("*.index.json", "*.tflite", "*.npz", "*.pkl", "adapter_*", "*.lock"),
)
_TOKENIZER = (
    *("tokenizer*", "tokenization_*.py", "special_tokens_map.json", "added_tokens.json", "vocab*"),
    *("merges.txt", "*.model", "*.tiktoken", "*.bpe", "chat_template*", f"{_TEMPLATES}/*"),
)
# A folder inside the model's folder is copied only if all of its files are of these kinds. It may be a run's
# folder.
_SMALL = ("*.jinja", "*.json", "*.py", "*.txt", "*.md", "*.model")
_LEARNT = ("architectures", "dtype")
_NO_MORE = ("torch_dtype", "quantization_config")
_OF_A_SCORER = ("num_labels", "id2label", "label2id", "pad_token_id")


def copy_files(model: ModelConfig, out: Path, *, scores: bool = False) -> None:
    """Copy all files except weights from the model's and the tokenizer's folder, byte for byte.

    The folder already has the model's config.json. Fields of config.json that the run has changed stay. Every
    other field is copied from the model's folder, even if transformers does not know the field.

    Args:
        model: the model section of the run's config.
        out: the folder to fill.
        scores: whether a reward model is exported.
    """
    written = parse_json((out / _CONFIG).read_text(encoding="utf-8"))
    source, tokenizer = Path(model.path), Path(model.tokenizer_path)
    for name in _names(source, out):
        if source.samefile(tokenizer) or not _fits(name, _TOKENIZER):
            _copy(source, name, out)
    copy_tokenizer(model, out)
    whole = parse_json((source / _CONFIG).read_text(encoding="utf-8"))
    # If a model has several parts, transformers loads only the text part.
    parts = (whole, whole.get("text_config") or {})
    stored = next((part for part in parts if part.get("model_type") == written["model_type"]), {})
    changed = _LEARNT + (_OF_A_SCORER if scores else ())
    kept = {name: value for name, value in stored.items() if name not in (*changed, *_NO_MORE)}
    learnt = {name: written[name] for name in changed if name in written}
    _write(out / _CONFIG, kept | learnt if stored else written)


def declare_ends(out: Path, ends: Sequence[int]) -> None:
    """Add the run's missing end tokens to generation_config.json, so that transformers stops at them.

    If no end token is missing, nothing changes.
    """
    declared = declared_ends(out)
    if not set(ends) - {*declared}:
        return
    settings = out / GENERATION
    kinds = GenerationConfig().to_dict()  # type: ignore[no-untyped-call]
    if settings.is_file():
        stored = parse_json(settings.read_text(encoding="utf-8"))
    else:  # take what transformers would take from config.json
        config = parse_json((out / _CONFIG).read_text(encoding="utf-8"))
        given = (config.get("text_config") or {}) | config
        stored = {name: value for name, value in given.items() if name in kinds and value is not None}
        stored.pop("transformers_version", None)
    _write(settings, stored | {"eos_token_id": list(dict.fromkeys((*declared, *ends)))})


def copy_tokenizer(model: ModelConfig, out: Path) -> None:
    """Copy a run's tokenizer files with its chat templates, or with the config's template instead."""
    source = Path(model.tokenizer_path)
    for name in _names(source, out):
        if _fits(name, _TOKENIZER):
            _copy(source, name, out)
    if model.custom_chat_template is None:
        return
    for old in out.glob("chat_template*"):
        old.unlink()
    shutil.rmtree(out / _TEMPLATES, ignore_errors=True)
    settings = out / _TOKENIZER_CONFIG
    if settings.is_file():
        read = parse_json(settings.read_text(encoding="utf-8"))
        if read.pop("chat_template", None) is not None:
            _write(settings, read)
    (out / _TEMPLATE).write_text(model.custom_chat_template, encoding="utf-8")


def _names(folder: Path, out: Path) -> Iterator[str]:
    """Yield the files to copy, relative to the folder."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")) or path in (out, *out.parents):
            continue
        if path.is_file() and not _fits(path.name, _LEFT):
            yield path.name
        elif path.is_dir():
            inner = [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
            if all(_fits(file.name, _SMALL) and not _fits(file.name, _LEFT) for file in inner):
                yield from (str(file.relative_to(folder)) for file in inner)


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _copy(folder: Path, name: str, out: Path) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / name, out / name)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
