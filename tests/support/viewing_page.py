"""The page of `tandem view` in a tab of Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from tests.support.viewing import GROUP, PROMPTS, STEPS, Client

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

COUNT = PROMPTS * GROUP * STEPS
"""The number of samples of a run of `write_viewed`."""


class Viewer:
    """A tab that opens pages and records errors in them."""

    def __init__(self, page: Page, client: Client, root: Path) -> None:
        self.page, self._client, self._root = page, client, root
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self, name: str, *runs: str, **params: str) -> Page:
        query = [f"run={quote(str(self._root / run))}" for run in runs or ("a",)]
        query += [f"{key}={quote(value)}" for key, value in params.items()]
        self.page.goto("about:blank")
        self.page.goto(f"{self._client.url}#/{name}?{'&'.join(query)}")
        return self.page

    def drag(self, place: Locator, start: float, end: float) -> None:
        """Drag the mouse over a place, between these shares of its width."""
        box = place.bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + box["width"] * start, box["y"] + 20)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * end, box["y"] + 30, steps=4)
        self.page.mouse.up()

    def params(self) -> dict[str, str]:
        found = parse_qs(urlsplit(self.page.url).fragment.partition("?")[2])
        return {name: values[0] for name, values in found.items() if name != "run"}

    def run(self, name: str) -> str:
        return str(self._root / name)


def await_text(place: Locator, text: str | re.Pattern[str]) -> None:
    place.filter(has_text=text).first.wait_for()


def summary(viewer: Viewer, matched: int) -> None:
    await_text(viewer.page.locator(".summary"), f"{matched} of {COUNT} samples")
