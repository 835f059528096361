"""In headless Chromium the report opens without errors, and selection, links, filters and keys work."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thunder_zero as tz
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.plan.amounts import duration
from thunder_zero.tools import Device, Link

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
MISSING += [] if importlib.util.find_spec("selenium") else ["selenium"]
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}"), pytest.mark.slow]
DEVICE = Device("slow", {"float32": 1e9}, 1e10, 1 << 30, intra_node=Link(1e8, 1e-6))
WIDE, NARROW = (1400, 1200), (700, 1200)


def build_chain() -> Chain:
    return Chain(*(ResidualBlock(16) for _ in range(8)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a report that compares two stages; return its address."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    traces = [traced(build_chain, (8, 16), tz.Policy(stage, reshard_after_forward=True)) for stage in (3, 2)]
    training: dict[str, Any] = {"loss": lambda y: y.square().mean(), "optimizer": torch.optim.AdamW}
    tz.tools.report(traces[0], path, device=DEVICE, beside=traces[1], **training)
    return Path(path).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(option)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver") or ""))
    yield driver
    driver.quit()


Ask = Callable[..., Any]  # evaluates JavaScript with arguments


@pytest.fixture
def shown(browser: Any, report: str) -> Ask:
    """Open the report."""
    return open_page(browser, report)


def open_page(browser: Any, address: str, size: tuple[int, int] = WIDE, scheme: str = "light") -> Ask:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get("about:blank")
    browser.get(address)
    return lambda script, *values: browser.execute_script(f"return {script}", *values)


def press(browser: Any, name: str, *keys: str) -> None:
    browser.find_element("id", name).send_keys(*keys)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_opens_without_errors_and_fits(browser: Any, report: str, size: tuple[int, int], scheme: str) -> None:
    ask = open_page(browser, report, size, scheme)
    assert browser.get_log("browser") == []
    assert ask("document.documentElement.scrollWidth") <= size[0]
    assert ask("getComputedStyle(document.body).backgroundColor") != (
        "rgb(255, 255, 255)" if scheme == "dark" else "rgb(0, 0, 0)"
    )
    painted = "new Set(pen.getImageData(0, 0, canvas.width, canvas.height).data.filter((_, at) => at % 4 < 3)).size"
    assert ask(painted) > 20
    assert ask("document.querySelectorAll('#rows .row').length") < 60 < ask("page.programs[0].rows.length")


def test_a_selection_shows_in_all_parts_and_has_a_link(browser: Any, report: str, shown: Ask) -> None:
    gather = shown("page.programs[0].collectives.findIndex((one) => one.exposed_seconds && one.backward)")
    line, op = shown(f"[page.programs[0].collectives[{gather}].launch, page.programs[0].collectives[{gather}].op]")
    shown(f"choose(0, {line}, {{ zoom: true }})")
    assert shown("location.hash") == f"#op={op}"
    for ask in (shown, open_page(browser, f"{report}#op={op}")):
        assert ask("chosen.line") == line
        (row,) = browser.find_elements("css selector", "#rows .row.is")
        assert row.text.startswith(str(op))
        (in_table,) = browser.find_elements("css selector", "#table tr.is")
        assert "gather, backward" in in_table.text
        assert "compute waits" in browser.find_element("id", "chosen").text
        explained = ask("page.programs[0].parameters[chosen.parameter].explained")
        explanation = browser.find_element("id", "explained").get_attribute("textContent")
        assert "".join(explanation.split()) == "".join(explained.split())
        assert ask(f"x(page.programs[0].lines.end[{line}])") > ask("gutter")
    wait = shown(f"page.programs[0].collectives[{gather}].wait")
    browser.find_element("id", "trace").click()
    shown(f"choose(0, {wait})")
    browser.find_element("css selector", f"#line-{wait} + .row, #line-{wait}").click()
    assert shown("chosen.line") in (wait, wait + 1)
    assert str(shown("chosen.line")) in shown("trace.getAttribute('aria-activedescendant')")


def click(browser: Any, ask: Ask, left: float, top: float) -> None:
    """Click on a point of the canvas."""
    ask("canvas.scrollIntoView()")
    box = ask("canvas.getBoundingClientRect().toJSON()")
    for kind in ("mousePressed", "mouseReleased"):
        event = {"x": box["left"] + left, "y": box["top"] + top, "button": "left", "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **event})


def test_a_click_on_a_bar_or_on_the_curve_selects_its_line(browser: Any, shown: Ask) -> None:
    for program in (0, 1):
        bars = f"page.programs[{program}].bars"
        bar = shown(f"{bars}.line.findIndex((_, at) => {bars}.lane[at] === 1)")
        left = shown(f"x(({bars}.start[{bar}] + {bars}.end[{bar}]) / 2)")
        click(browser, shown, left, shown(f"areas[{program}].lanes[1] + areas[{program}].lane / 2"))
        assert shown("[chosen.program, chosen.line]") == [program, shown(f"{bars}.line[{bar}]")]
    ends, peak = "page.programs[0].lines.end", "page.programs[0].memory.peak.line"
    click(browser, shown, *shown(f"[x({ends}[{peak}]), areas[0].bottom - 5]"))
    assert shown("chosen.program") == 0
    assert shown(f"Math.abs(x({ends}[chosen.line]) - x({ends}[{peak}]))") < 3, "pixels"


def test_keys_zoom_move_and_select(browser: Any, shown: Ask) -> None:
    from selenium.webdriver import Keys

    length = "view.end - view.start"
    whole = shown(length)
    press(browser, "lanes", "+", "+")
    assert shown(length) == pytest.approx(whole * 0.36)
    start = shown("view.start")
    press(browser, "lanes", Keys.ARROW_RIGHT)
    assert shown("view.start") == pytest.approx(start + whole * 0.06)
    press(browser, "lanes", "-")
    assert shown(length) == pytest.approx(whole * 0.6)
    press(browser, "lanes", "0", Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert (shown(length), shown("chosen.line")) == (whole, 1)
    assert "op=" in shown("document.getElementById('said').textContent")
    press(browser, "trace", Keys.PAGE_DOWN, Keys.ARROW_UP, Keys.ENTER)
    assert shown("chosen.line") == 20
    assert shown(length) < whole
    assert browser.find_elements("css selector", "#rows .row.is")
    press(browser, "lanes", Keys.ESCAPE)
    assert shown("chosen.line") == -1
    script = "canvas.dispatchEvent(new WheelEvent('wheel', { deltaY: -300, clientX: 600, cancelable: true }))"
    press(browser, "lanes", "0")
    shown(script)
    assert shown(length) < 0.6 * whole


def test_a_link_shows_its_details_and_back_returns(browser: Any, report: str) -> None:
    for size in ((1366, 768), NARROW):
        ask = open_page(browser, report, size)
        first, second = browser.find_elements("css selector", "#exposed .link")[:2]
        first.click()
        link, top = ask("location.hash"), ask("document.getElementById('chosen').getBoundingClientRect().top")
        assert 0 <= top < size[1] / 2
        ask("arguments[0].click()", second)
        assert ask("location.hash") != link
        browser.back()
        assert ask("location.hash") == link
        browser.find_element("css selector", "body").send_keys("+")
        assert ask("view.end - view.start") < ask("whole")
        browser.find_element("css selector", "body").send_keys("0")
        assert ask("view.end - view.start") == ask("whole")


def test_the_table_filters_sorts_and_finds(browser: Any, shown: Ask) -> None:
    rows = "[...document.querySelectorAll('#table tbody tr')].length"
    every = shown("page.programs[0].collectives.length")
    assert shown(rows) == every
    press(browser, "filter", "3")
    matching = shown("page.programs[0].collectives.filter((one) => /3/.test(one.unit + one.label + one.why)).length")
    assert 0 < matching <= shown(rows) < every
    browser.find_element("id", "filter").clear()
    press(browser, "filter", " ", "\b")
    browser.find_element("id", "waiting").click()
    waiting = shown("page.programs[0].collectives.filter((one) => one.exposed_seconds).length")
    assert shown(rows) == waiting < every
    header = browser.find_element("xpath", "//th/button[text()='compute waits']")
    header.click()
    order = "[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[7].textContent)"
    longest = duration(shown("Math.max(...page.programs[0].collectives.map((one) => one.exposed_seconds))"))
    assert shown(order)[0] == longest
    header.click()
    assert shown(order)[-1] == longest
    assert header.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    press(browser, "find", "4.UP", "\n")  # a part of a name
    assert shown("page.programs[0].parameters[chosen.parameter].path") == "4.up.weight"
    browser.find_element("id", "find").clear()
    press(browser, "find", "nonsense", "\n")
    assert "No line" in shown("document.getElementById('find').validationMessage")
    browser.find_element("xpath", "//span[@id='which']/button[text()='ZeRO-2']").click()
    assert shown("chosen.program") == 1
    assert browser.get_log("browser") == []


def test_the_site_can_be_searched_from_the_disk(browser: Any, tmp_path: Path) -> None:
    """On a page from the disk the theme's worker does not start; docs/search-from-disk.js replaces it."""
    from selenium.webdriver.support.ui import WebDriverWait

    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=250)
    shown = open_page(browser, (tmp_path / "start.html").as_uri())
    shown("document.querySelector('#__search').click()")
    browser.find_element("css selector", "input[name=query]").send_keys("start")
    hrefs = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    links = WebDriverWait(browser, timeout=30).until(lambda _: shown(hrefs))
    assert any("/start.html" in link for link in links)
    assert not any("/source/" in link for link in links), "code that pages link to"
