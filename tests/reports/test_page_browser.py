"""The report in a real browser: Debian's chromium, headless, spoken to over a pipe (Chrome DevTools Protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from results_folder import EXTRA, make_results
from scaleinv.plots import style
from scaleinv.reports import colors
from scaleinv.reports import comparison as report

pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Browser:
    """One tab. Commands go to chromium's file descriptor 3 and answers come from 4, as JSON that ends in NUL."""

    def __init__(self, profile: Path) -> None:
        commands, self.output = os.pipe()
        self.input, answers = os.pipe()
        redirect = f'exec "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.buffer, self.count, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.input], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self.input, 1 << 20) if ready else b""
            assert chunk, "chromium does not answer"
            self.buffer += chunk
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int = 1200, height: int = 900) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def run(self, script: str) -> Any:
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def move(self, selector: str, across: float) -> None:
        """Put the mouse over an element, that part of its width from the left."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y, width, height = self.run(f"(r => [r.x, r.y, r.width, r.height])({place}.getBoundingClientRect())")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + across * width, y=y + height / 2)

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def screenshot(self, path: Path) -> None:
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.session = ""
        self.send("Browser.close")
        self.process.wait(10)
        os.close(self.input)
        os.close(self.output)


KEYS = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", lambda *_: [])  # they take the most time
        return report.write_report(make_results(tmp_path_factory.mktemp("results")))


@pytest.fixture
def tab(browser: Browser, page: Path) -> Browser:
    """The report, just opened."""
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.open(page)
    return browser


def rows(tab: Browser) -> list[str]:
    return tab.run("[...document.querySelectorAll('#table-loss tbody th')].map(cell => cell.textContent)")


def problems(tab: Browser) -> list[Any]:
    kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    return [event["params"] for event in tab.events if event["method"] in kinds]


def test_renders_without_errors_and_without_network(tab: Browser, page: Path) -> None:
    assert problems(tab) == []
    fetched = [
        event["params"]["request"]["url"] for event in tab.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in fetched if not url.startswith("data:")] == [page.as_uri()]
    counts = tab.run(
        "[...document.querySelectorAll('figure.chart')].map(f => [f.dataset.chart, f.querySelectorAll('.plot').length,"
        " f.querySelectorAll('.plot .series').length, f.querySelectorAll('.legend [aria-pressed=true]').length])"
    )
    assert counts == [
        ["loss-by-length", 2, 12, 6],
        ["loss-by-position", 3, 18, 6],
        ["training", 4, 16, 4],
        ["needle-by-length", 1, 3, 3],
        ["tau-sweep", 1, 3, 3],
    ]
    assert "NaN" not in tab.run("document.body.innerHTML")
    axes = tab.run("[...document.querySelectorAll('[data-chart=loss-by-length] text')].map(text => text.textContent)")
    assert {"1×", "4×", "16×", "loss (nats per byte)", "training length"} <= set(axes)


def test_names_stay_text(tab: Browser) -> None:
    assert EXTRA in rows(tab)
    assert EXTRA in tab.run("[...document.querySelectorAll('.legend span')].map(span => span.textContent)")
    assert tab.run("document.querySelectorAll('b').length") == 0


def test_tables_sort(tab: Browser) -> None:
    header = "document.querySelectorAll('#table-loss thead button')[3]"
    before = rows(tab)
    tab.run(f"{header}.click()")
    assert rows(tab)[0] == "Scale-invariant + p-RoPE"
    assert rows(tab)[-1] == "RoPE"
    assert tab.run(f"{header}.closest('th').ariaSort") == "ascending"
    tab.run(f"{header}.focus()")
    tab.press("Enter")
    assert rows(tab)[0] == "RoPE"
    assert tab.run(f"{header}.closest('th').ariaSort") == "descending"
    tab.run("document.querySelector('#table-loss thead button').click()")
    assert rows(tab) == sorted(before, key=str.lower)
    assert tab.run("document.querySelectorAll('#table-loss [aria-sort]').length") == 1
    assert problems(tab) == []


def test_series_switch_off_and_on(tab: Browser) -> None:
    chart = "document.querySelector('[data-chart=loss-by-length]')"
    drawn = f"[...{chart}.querySelectorAll('.plot .series')].map(group => group.dataset.series)"
    height = f"{chart}.querySelector('.plot [data-series=\"LogN + p-RoPE\"] path').getBBox().height"
    button = f"{chart}.querySelector('.legend button')"
    assert "RoPE" in tab.run(drawn)
    tab.run(f"{button}.click()")
    assert "RoPE" not in tab.run(drawn)
    assert tab.run(f"{button}.ariaPressed") == "false"
    tab.run(f"{button}.click()")
    assert "RoPE" in tab.run(drawn)
    before = tab.run(height)
    for name in ("RoPE", "RoPE + NTK"):
        tab.run(f"[...{chart}.querySelectorAll('.legend button')].find(b => b.textContent === '{name}').click()")
    assert tab.run(height) > before  # the axis follows what is shown
    tab.run(f"{chart}.querySelector('.all').click()")
    assert len(tab.run(drawn)) == 12
    tab.run(f"{chart}.querySelector('.all').click()")
    assert tab.run(drawn) == []
    assert problems(tab) == []


def test_zoom_tells_the_lower_half_apart(tab: Browser) -> None:
    chart = "document.querySelector('[data-chart=loss-by-position]')"
    height = f"{chart}.querySelectorAll('.panel')[2].querySelector('[data-series=ALiBi] path').getBBox().height"
    before = tab.run(height)
    tab.run(f"{chart}.querySelector('.zoom').click()")
    assert tab.run(f"{chart}.querySelector('.zoom').ariaPressed") == "true"
    assert tab.run(height) > 2 * before
    tab.run(f"{chart}.querySelector('.zoom').click()")
    assert tab.run(height) == before
    panels = "[...document.querySelectorAll('[data-chart=loss-by-length] .panel')]"
    curve = "querySelector('[data-series=\"Scale-invariant + p-RoPE\"] path').getBBox().height"
    whole, close = tab.run(f"{panels}.map(panel => panel.{curve})")
    assert close > 3 * whole
    dots = "document.querySelectorAll('[data-chart=loss-by-length] .panel:first-child .seed').length"
    assert tab.run(dots) == 6 * 3 * 2
    assert problems(tab) == []


def test_figures_of_the_analysis_have_no_white_ground_in_the_dark(tab: Browser) -> None:
    mirrored = "getComputedStyle(document.querySelector('#analysis img')).filter"
    assert tab.run(mirrored) == "none"
    tab.run("document.getElementById('theme').click()")
    assert tab.run(mirrored) == "invert(1) hue-rotate(180deg)"
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.run(mirrored) == "invert(1) hue-rotate(180deg)"
    tab.run("document.getElementById('theme').click()")
    assert tab.run(mirrored) == "none"


def test_hover_and_arrow_keys_show_values(tab: Browser) -> None:
    plot, tip = "[data-chart=loss-by-length] .plot", "document.querySelector('[data-chart=loss-by-length] .tip')"
    assert tab.run(f"{tip}.hidden")
    tab.move(plot, 0.97)
    lines = tab.run(f"[...{tip}.children].map(line => line.textContent)")
    assert lines[:2] == ["16× (8k)", "RoPE2.198 ± 0.004"]
    assert lines[-1] == "Scale-invariant + p-RoPE1.141 ± 0.004"
    tab.run(f"document.querySelector('{plot}').focus()")
    tab.press("ArrowLeft")
    assert tab.run(f"{tip}.firstChild.textContent") == "4× (2k)"
    tab.press("Escape")
    assert tab.run(f"{tip}.hidden")
    tab.move("[data-chart=needle-by-length] .plot", 0.1)
    assert "0.960 (0.91–0.99)" in tab.run("document.querySelector('[data-chart=needle-by-length] .tip').textContent")


def test_light_and_dark(tab: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    black = "getComputedStyle(document.querySelector('[data-series=\"Scale-invariant + p-RoPE\"]')).color"
    assert (tab.run(background), tab.run(black)) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    tab.run("document.getElementById('theme').click()")
    assert (tab.run(background), tab.run(black)) == ("rgb(21, 24, 28)", "rgb(245, 245, 245)")
    assert int(colors.DARK_PAGE[1:], 16) == 21 << 16 | 24 << 8 | 28
    tab.run("document.getElementById('theme').click()")
    assert tab.run(background) == "rgb(255, 255, 255)"
    tab.open(Path(tab.run("decodeURIComponent(location.pathname)")))
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.run(background) == "rgb(21, 24, 28)"
    assert tab.run("document.getElementById('theme').ariaPressed") == "true"


@pytest.mark.parametrize(
    ("name", "width", "theme"), [("light", 1200, "light"), ("dark", 1200, "dark"), ("phone", 390, "light")]
)
def test_fits_the_screen(tab: Browser, page: Path, tmp_path: Path, name: str, width: int, theme: str) -> None:
    tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.open(page, width=width)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("Math.min(...[...document.querySelectorAll('.plot')].map(plot => plot.clientWidth))") > 300
    tab.screenshot(tmp_path / f"{name}.png")  # to look at: pytest --basetemp=FOLDER
    assert (tmp_path / f"{name}.png").stat().st_size > 20_000
