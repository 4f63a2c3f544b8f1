"""The page in a real browser: no error, no network, all figures, on a desktop and on a phone, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from laconic.tools.compare.judging import headline
from laconic.tools.compare.report import write_page
from tests.tools.compare.outcomes import ALL

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytest.importorskip("matplotlib")
selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="needs a browser: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = selenium.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "out.html"
    write_page(path, ALL, ["compare", "--link", "10mbit", "--report", "out.html"])
    return path.as_uri()


def shown(browser: Any, address: str, scheme: str, width: int) -> None:
    """Open the page with this colour scheme and this screen width, offline."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    browser.get(address)


@pytest.mark.parametrize("width", [1280, 1000, 700, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page(browser, address, scheme, width):
    shown(browser, address, scheme, width)
    assert browser.get_log("browser") == []
    assert browser.find_element("id", "headline").text == headline(ALL)
    for name in ("loss-time", "loss-bytes", "time", "levels"):
        figure = browser.find_element("css selector", f"#{name} svg")
        assert figure.size["width"] > 0.6 * min(width, 500)
        assert figure.size["height"] > 150
        assert len(figure.find_elements("css selector", "path")) > 5
        assert len(figure.find_elements("css selector", "text")) > 3
    assert len(browser.find_elements("css selector", "#table tbody tr")) == len(ALL)
    for name in ("command", "facts", "data"):
        assert browser.find_element("id", name).is_displayed()
    fits = "return document.documentElement.scrollWidth <= innerWidth"
    assert browser.execute_script(fits), "the page scrolls sideways"
    tables = "return [...document.querySelectorAll('.wide')].map(each => each.scrollWidth - each.clientWidth)"
    assert browser.execute_script(tables) == [0, 0], "a table is cut"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_dark_is_dark_and_text_has_contrast(browser, address):
    """The contrast of text and figures with the background, in both schemes."""
    for scheme in ("light", "dark"):
        shown(browser, address, scheme, 1200)
        paper = brightness(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        assert (paper > 0.9) if scheme == "light" else (paper < 0.1)
        for selector in ("#headline", "#loss-time svg text", "figcaption"):
            inked = "fill" if "text" in selector else "color"
            ask = f"return getComputedStyle(document.querySelector('{selector}')).{inked}"
            ink = brightness(browser.execute_script(ask))
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5, (scheme, selector)


def brightness(colour: str) -> float:
    """Relative luminance (WCAG 2) of `rgb(r, g, b)`."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_raw_data_can_be_read_back(browser, address):
    shown(browser, address, "light", 1200)
    link = browser.find_element("id", "data")
    assert link.get_attribute("download") == "laconic-compare.json"
    read = "return fetch(arguments[0].href).then(answer => answer.json()).then(rows => rows.map(row => row.plan))"
    browser.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    assert browser.execute_script(read, link) == [repr(outcome.plan) for outcome in ALL]
