"""Chat templates of real models, from an installed trl or from the folder TANDEM_CHAT_TEMPLATES."""

import os
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.data.chat import ChatTemplate
from tandem.data.encoder import SHAPE, Encoder
from tandem.data.examples import ConversationForm
from tandem.data.truncation import Limit
from tests.data.cases import talk
from tests.support.tokenizers import KINDS

_MARKER = re.compile(
    r"<\|[^|<>\s]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_(?:turn|utterance)>|\[gMASK\]|<sop>|</s>"
)
_MARKS = re.compile(r"{%-?\s*generation\s*-?%}")


def _folder():
    if named := os.environ.get("TANDEM_CHAT_TEMPLATES"):
        return Path(named)
    found = find_spec("trl")
    return None if found is None or found.origin is None else Path(found.origin).parent / "chat_templates"


_FOLDER = _folder()
_FILES = sorted(_FOLDER.glob("*.jinja")) if _FOLDER else []
_CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
_X = {"type": "object", "properties": {"x": {"type": "integer"}}}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _X}}]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": talk("The sum?", "The answer"),
    "two": talk("Q", "The sum", "Sure?", "No"),
    "system": [{"role": "system", "content": "Be kind"}, *talk("Q", "The sum")],
    "blanks": talk(" Q\n", " The sum \n", "a", "\n\nb "),
    "reasoning": talk("Q", "The sum", "Sure?", "No", reasoning_content="hm"),
    "thought": talk("Q", "<think>\nhm\n</think>\n\nThe sum", "Sure?", "<think>\noh\n</think>\n\nNo"),
    "calls": [
        *talk("Q"), {"role": "assistant", "content": "", "tool_calls": _CALLS},
        {"role": "tool", "name": "f", "content": "2"}, {"role": "assistant", "content": "The sum"},
    ],
}  # fmt: skip


@pytest.mark.skipif(not _FILES, reason="no trl here, and TANDEM_CHAT_TEMPLATES names no folder")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_a_real_template_trains_what_generation_meets(path, kind):
    refused = refusals(path, kind)
    assert all(re.search("[Rr]oles? |roles$", why) for why in refused.values()), refused
    assert not refused.keys() - {"system", "calls"}


def refusals(path, kind):
    """Check all conversations, and return which ones the template itself rejects, and why."""
    source = path.read_text(encoding="utf-8")
    tokenizer = KINDS[kind](sorted(set(_MARKER.findall(source))), source)
    template = ChatTemplate(tokenizer, None)
    encoder = Encoder(ConversationForm("m", "t"), tokenizer, template, Limit(10**6, ""), learnt=True)
    refused = {}
    for name, messages in CONVERSATIONS.items():
        tools = _TOOLS if name == "calls" else None
        part = encoder.part([{"m": messages, "t": tools}], [0])
        assert part.error is None and SHAPE not in part.problems, (name, part.error)
        if part.problems:
            (((_, refused[name]),),) = part.problems.values()
            continue
        cuts = pairwise([0, *part.lengths.cumsum().tolist()])
        rows = [(part.ids[a:b].tolist(), part.masks[a:b].tolist()) for a, b in cuts]
        _follows(tokenizer, template, messages, tools, rows, bool(_MARKS.search(source)))
    return refused


def _follows(tokenizer, template, messages, tools, rows, marked):
    read = template.read(messages)
    rendered = template.render(messages, tools=tools)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [template.render(messages[:at], generation_prompt=True, tools=tools) for at in turns]
    if len(rows) == 1 and (marked or all(map(rendered.startswith, prompts))):
        whole = tokenizer.apply_chat_template(
            read, tools=tools, return_dict=True, return_assistant_tokens_mask=marked
        )
        (ids, mask), wanted = rows[0], whole["input_ids"]
        text = tokenizer.decode(wanted)
        assert tokenizer.decode(ids)[: len(text)] == text  # the end token of the last turn may follow
        if ids == wanted and marked:
            assert mask == list(map(bool, whole["assistant_masks"]))
    for turn, prompt in zip(turns, prompts, strict=True):
        met = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        starts = [
            (ids, mask, at)
            for ids, mask in rows
            for at in range(1, len(ids))
            if mask[at] and not mask[at - 1] and tokenizer.decode(ids[:at]) == tokenizer.decode(met)
        ]
        assert marked or len(starts) == 1
        for ids, mask, start in starts:
            assert turn != turns[0] or ids[:start] == met
            end = mask.index(False, start) if False in mask[start:] else len(mask)
            written = tokenizer.decode(ids[start:end])
            assert messages[turn]["content"].split("</think>")[-1].strip() in written
            assert marked or ids[end - 1] in tokenizer.get_added_vocab().values()
