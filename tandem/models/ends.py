"""Functions that find the tokens that end a response, from all files of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.errors import ModelError
from tandem.texts import parse_json

CONFIG, GENERATION = "config.json", "generation_config.json"
_ANSWER = "tandem"
_TURNS = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _ANSWER}]
_MORE = [*_TURNS, {"role": "user", "content": "2"}]


def stop_token_ids(model_path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the sorted token ids at which responses end.

    The result contains the ids at which transformers stops for this folder. If there are none, it contains
    the end tokens of the text model in config.json. The result also contains the tokenizer's end-of-sequence
    token. If the chat template ends the assistant's message with another token, this token is added.

    Args:
        model_path: the model's folder.
        tokenizer: the model's tokenizer, with the chat template that the run uses.

    Raises:
        ModelError: If an end token is not a token id, or a file cannot be read.
    """
    ids = {tokenizer.eos_token_id, *(declared_ends(model_path) or _of_config(model_path))}
    turn = _tokens_after_answer(tokenizer)
    if not ids & {*turn}:
        ids |= {*turn[:1]}
    return tuple(sorted(token for token in ids if token is not None))


def declared_ends(folder: str | Path) -> tuple[int, ...]:
    """Return the end tokens at which `generate` of transformers stops.

    The tokens are read from generation_config.json or, if this file does not exist, from config.json.

    Raises:
        ModelError: see `stop_token_ids`.
    """
    name = GENERATION if (Path(folder) / GENERATION).is_file() else CONFIG
    return _ends_of(_read(Path(folder) / name), folder)


def _of_config(folder: str | Path) -> tuple[int, ...]:
    """Return the end tokens in config.json, or in the `text_config` inside it."""
    config = _read(Path(folder) / CONFIG)
    return _ends_of(config, folder) or _ends_of(config.get("text_config") or {}, folder)


def _ends_of(stored: dict[str, Any], folder: str | Path) -> tuple[int, ...]:
    declared = stored.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            "an end token is not a token id",
            field="eos_token_id",
            got=f"{declared!r} in {folder}",
            expected="a whole number, or a list of whole numbers",
            remedy=f"fix it in {GENERATION} or {CONFIG}",
        )
    return tuple(ids)


def _tokens_after_answer(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the chat template writes right after the assistant's last message.

    If the template writes nothing there, return the special tokens that start the next message.
    """
    names = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    tokens = sorted(names.keys() - {tokenizer.unk_token, tokenizer.pad_token, ""}, key=len, reverse=True)
    after = next(filter(None, (_rendered(tokenizer, turns) for turns in (_TURNS, _MORE))), "")
    found: list[int] = []
    while token := next((token for token in tokens if after.startswith(token)), ""):
        found.append(names[token])
        after = after.removeprefix(token)
    return found


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> str:
    """Return the text that the chat template writes after the assistant's message."""
    if tokenizer.chat_template is None:
        return ""
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template may raise any exception; code that needs the template reports the error
        return ""
    return text.rpartition(_ANSWER)[2].lstrip()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(stored, dict):
            return stored
        problem = f"{type(stored).__name__} instead of an object"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ModelError(
        "a file of the model's folder cannot be read",
        field=str(path),
        got=problem,
        remedy="copy or download it again",
    )
