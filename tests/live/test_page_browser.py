"""The page in a real browser: it updates, it alarms, it survives a restart, and names stay text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from cotenant.control.revision import RolloutOutcome
from cotenant.live.access import Access, Role
from cotenant.live.http import HttpServer
from cotenant.live.page import PageFeed
from tests.live.browser import Browser, headless_browser
from tests.live.page_source import WrittenSource
from tests.live.stub import StubCore

EVIL = "<img src=x onerror=\"document.title='owned'\">"
TOKEN = "observe-0123456789"  # noqa: S105


class PageServer:
    """A server of the page, on a loop of its own, in a thread."""

    def __init__(self, port: int = 0, *names: str, access: Access | None = None) -> None:
        self.source = WrittenSource(names or ("resnet", EVIL))
        self.source.settle()
        self._loop = uvloop.new_event_loop()
        self._started, self._access, self.port = threading.Event(), access, port
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(60)
        self.address = f"http://127.0.0.1:{self.port}/"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopping, core = asyncio.Event(), StubCore()
        self._feed = PageFeed(self.source, clock=lambda: self.source.now, period=0.05)
        self._feed.start()
        server = HttpServer(core, page=self._feed, access=self._access)
        self.port = await server.listen("127.0.0.1", self.port)
        self._started.set()
        await self._stopping.wait()
        self._feed.stop()
        await server.stop(5.0)
        core.arena.close()

    def change(self, change: Callable[[WrittenSource], Any], seconds: float = 5.0) -> None:
        """Change what the server sees, that many seconds later."""
        done = threading.Event()

        def apply() -> None:
            change(self.source)
            self.source.now += seconds
            done.set()

        self._loop.call_soon_threadsafe(apply)
        assert done.wait(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_browser() as found:
        yield found


@pytest.fixture
def server() -> Iterator[PageServer]:
    served = PageServer()
    yield served
    served.stop()


MODEL = "document.getElementById('model-resnet')"
SHOWN = f"{MODEL} && {MODEL}.innerText.includes(arguments[0])"


def test_page_follows_the_server_without_a_reload(browser: Browser, server: PageServer) -> None:
    browser.open(server.address)
    browser.until(SHOWN, "no requests")
    browser.run("window.stays = true")
    server.change(lambda source: source.counts["resnet"].add(500))
    browser.until(SHOWN, "✓ SLO met")
    browser.until(SHOWN, "100 %")
    server.change(lambda source: source.roll("resnet is offered more", RolloutOutcome.COMPLETED))
    browser.until("document.getElementById('revision').textContent === 'Plan 2: resnet is offered more'")
    browser.until("document.querySelectorAll('#rollouts tbody tr').length === 1")
    cells = "[...document.querySelectorAll('#durations tbody td')].map((cell) => cell.textContent)"
    assert browser.run(f"return {cells}") == ["prepare", "1", "800 ms", "800 ms", "800 ms"]
    assert browser.run("return document.getElementById('late').textContent") == (
        "since the start · 3 late requests while a rollout was under way"
    )
    server.change(lambda source: source.work(0, "resnet", 2.0, slowdown=1.5))
    browser.until("document.getElementById('partitions').innerText.includes('1.50 × predicted 1.20 ×')")
    browser.until("document.querySelectorAll('.uplot canvas').length >= 3")
    browser.until(f"{MODEL}.querySelector('.plot').getAttribute('aria-label').includes('all: now')")
    assert browser.run("return window.stays") is True
    assert browser.log() == []


def test_page_alarms_in_red_and_says_so_to_a_screen_reader(browser: Browser, server: PageServer) -> None:
    browser.open(server.address)
    browser.until(SHOWN, "no requests")
    server.change(lambda source: source.counts["resnet"].add(3, refused=97))
    browser.until(SHOWN, "✕ SLO violated")
    red = browser.run("return getComputedStyle(document.documentElement).getPropertyValue('--bad')")
    value = f"{MODEL}.querySelector('.numbers dd')"
    shown = browser.run(f"return getComputedStyle({value}).color")
    assert red == "#b3261e" and shown == "rgb(179, 38, 30)"
    assert browser.run("return document.querySelector('.alarm').innerText").startswith("✕\nresnet: 3 % within 50 ms")
    assert browser.run("return document.querySelector('[role=alert]').textContent").startswith("resnet: 3 %")
    assert browser.run("return document.title") == "(1) Cotenant"
    assert browser.run("return document.querySelector('.alarm a').getAttribute('href')") == "#model-resnet"


def test_page_survives_a_restart_of_the_server_and_keeps_its_charts(browser: Browser) -> None:
    server = PageServer()
    browser.open(server.address)
    browser.until(SHOWN, "no requests")
    for _ in range(3):
        server.change(lambda source: source.counts["resnet"].add(100))
        browser.until("document.getElementById('figures').innerText.includes('1 of 1')")
    points = f"{MODEL}.querySelector('.plot').getAttribute('aria-label')"
    browser.until(f"{points}.includes('at most 20')")
    server.stop()
    browser.until("document.getElementById('connection').textContent === 'Reconnecting'")
    assert browser.run("return document.body.classList.contains('stale')") is True
    again = PageServer(server.port)
    try:
        again.source.now += 120.0
        browser.until("document.getElementById('connection').textContent === 'Serving'")
        again.change(lambda source: source.counts["resnet"].add(5))
        again.change(lambda source: source.counts["resnet"].add(5))
        browser.until(f"{points}.includes('now 1,') && {points}.includes('at most 20')")
        assert browser.run("return document.body.classList.contains('stale')") is False
    finally:
        again.stop()


def test_page_names_and_reasons_with_markup_stay_text(browser: Browser, server: PageServer) -> None:
    browser.open(server.address)
    server.change(lambda source: source.counts[EVIL].add(1, refused=99))
    server.change(lambda source: setattr(source, "broken", {"b": EVIL}))
    server.change(lambda source: source.roll(EVIL, RolloutOutcome.ROLLED_BACK, EVIL))
    server.change(lambda source: source.decisions.append((source.now, EVIL, EVIL)))
    for place in ("#alarms", "#model-rows", "#devices", "#rollouts", "#decisions"):
        browser.until("document.querySelector(arguments[0]).textContent.includes(arguments[1])", place, EVIL)
    assert browser.run("return [document.images.length, document.title]") == [1, "(2) Cotenant"]


def test_page_asks_for_the_token_that_the_server_wants(browser: Browser) -> None:
    server = PageServer(access=Access({Role.OBSERVE: [TOKEN]}))
    try:
        browser.open(server.address)
        browser.until("!document.getElementById('login').hidden")
        assert browser.run("return document.activeElement.id") == "token"
        enter = "token.value = arguments[0]; document.querySelector('#login button').click()"
        browser.run(enter, "another-0123456789")
        browser.until("document.getElementById('login-why').textContent.includes('does not know the token')")
        browser.run(enter, TOKEN)
        browser.until(SHOWN, "no requests")
        assert browser.run("return document.getElementById('login').hidden") is True
    finally:
        server.stop()
        browser.run("sessionStorage.clear()")


@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_its_window_and_all_is_reached_by_keyboard(browser: Browser, width: int) -> None:
    names = [f"a-model-with-quite-a-long-name-{number}" for number in range(30)]
    server = PageServer(0, *names)
    try:
        browser.resize(width)
        browser.open(server.address)
        browser.until("document.querySelectorAll('.model').length === 30")
        assert browser.run("return document.documentElement.scrollWidth") == width
        stops = []
        for _ in range(5):
            browser.press("Tab")
            stops.append(browser.run("return document.activeElement.textContent"))
        assert stops == ["Skip to the models", "Models", "Partitions", "Plan", "Machine"]
        named = "document.querySelectorAll('article[aria-label]').length"
        assert browser.run(f"return {named}") == 45  # of models and partitions
        browser.until("document.querySelectorAll('.plot[aria-label*=\"last ten minutes\"]').length > 0")
    finally:
        server.stop()
