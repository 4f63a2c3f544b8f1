"""The site as built: `make docs` builds it and runs this with LACONIC_SITE. Every link is followed."""

from __future__ import annotations

import doctest
import json
import os
import re
import shutil
import zlib
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from laconic_site.keywords import public_names

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("LACONIC_SITE", "-"))
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="needs the built site: make docs")
KEYWORDS = [
    *("PowerSGDState", "matrix_approximation_rank", "warm_start", "error feedback", "PostLocalSGDState"),
    *("average_parameters", "PeriodicModelAverager", "HierarchicalModelAverager", "period_group_size_dict"),
    "LostWorkerError",
]


@pytest.fixture(scope="module")
def pages():
    found = {path.relative_to(SITE).as_posix(): path.read_text() for path in SITE.rglob("*.html")}
    assert len(found) > 300
    return found


@pytest.fixture(scope="module")
def anchors(pages):
    return {name: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for name, text in pages.items()}


@pytest.fixture(scope="module")
def index():
    return json.loads((SITE / "keywords.json").read_text())


def follow(page: str, href: str, anchors: dict[str, set[str]]) -> str:
    """Return what is wrong with a link, or nothing."""
    _, _, path, _, fragment = urlsplit(unescape(href))
    target = (SITE / page).parent / unquote(path) if path else SITE / page
    target = Path(os.path.normpath(target))
    if not target.is_file():
        return f"{page}: {href}: there is no such file"
    name = target.relative_to(os.path.normpath(SITE)).as_posix()
    if fragment and name in anchors and unquote(fragment) not in anchors[name]:
        return f"{page}: {href}: there is no such anchor"
    return ""


def test_no_link_leads_nowhere(pages, anchors):
    seen, wrong = 0, []
    for page, text in pages.items():
        for href in set(re.findall(r'<(?:a|link|img|script)\b[^>]*?\b(?:href|src)="([^"]+)"', text)):
            if urlsplit(href).scheme:
                continue
            seen += 1
            if problem := follow(page, href, anchors):
                wrong.append(problem)
    assert seen > 10_000
    assert not wrong, "\n".join(wrong[:50])


def test_links_read_as_titles_and_not_as_files(pages):
    for page, text in pages.items():
        if not page.startswith("source/"):
            assert not re.findall(r"<a\b[^>]*>(?:<span[^>]*>)?[\w/]+\.md<", text), page


def test_nothing_is_loaded_from_the_network(pages):
    for page, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="(https?:)?//', text)
        loaded += re.findall(r'<link\b[^>]*rel="(?:stylesheet|preload)"[^>]*href="https?://', text)
        assert not loaded, page


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_leads_to_definition_sections_and_tests(name, index, pages, anchors):
    keyword = index["keywords"][name]
    for kind in ("definitions", "sections", "tests"):
        assert keyword[kind], f"{name} has no {kind}"
        for each in keyword[kind]:
            assert not follow("index.html", each["href"], anchors)
    for each in keyword["definitions"]:
        path, line = each["at"].rsplit(":", 1)
        words = (ROOT / path).read_text().splitlines()[int(line) - 1]
        assert re.split(r"[.(=)]+", each["name"].rstrip("=)"))[-1] in words
    for each in keyword["sections"]:
        text = re.sub(r"<[^>]+>", "", pages[each["href"].partition("#")[0]])
        assert re.search(re.escape(name).replace(r"\ ", r"[\s-]+"), unescape(text), re.I)
    assert f'href="{keyword["sections"][0]["href"]}"' in pages["keywords.html"]


def test_every_source_file_has_a_page_with_its_keywords(index, pages, sources):
    for source in sources:
        page = pages[f"source/{source.path}.html"]
        assert f'id="L{len(source.text.splitlines())}"' in page or not source.text
        for name in index["files"].get(source.path, []):
            assert name in unescape(page), (source.path, name)


def test_every_public_name_is_in_the_reference(sources):
    lines = zlib.decompress((SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    known = {line.split(" ")[0].rsplit(".", 1)[-1] for line in lines if " py:" in line}
    assert public_names(sources) <= known


def test_docstrings_become_restructured_text():
    docstrings = pytest.importorskip("laconic_site.docstrings")
    failed, tried = doctest.testmod(docstrings)
    assert tried and not failed


def test_there_is_a_text_for_machines():
    assert "laconic" in (SITE / "llms.txt").read_text()
    assert "PowerSGD" in (SITE / "llms-full.txt").read_text()


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"):
        options.add_argument(f"--{flag}")
    options.add_argument("--disable-component-update")
    options.add_argument("--disable-sync")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def open_page(browser, page: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(f"{SITE.resolve().as_uri()}/{page}")


def test_search_works_from_the_file_system(browser):
    from selenium.webdriver.support.wait import WebDriverWait

    open_page(browser, "search.html?q=matrix_approximation_rank", 1200)
    found = "return [...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))"
    wanted = ("api/twin.html", "from_torch.html")  # results come one after another
    WebDriverWait(browser, 20).until(lambda b: all(any(w in href for href in b.execute_script(found)) for w in wanted))


@pytest.mark.parametrize(
    "page",
    [
        *("index.html", "concepts.html", "start.html", "keywords.html", "api/session.html"),
        *("slower.html", "two_machines.html", "unequal.html", "learning_rate.html", "ports.html", "powersgd_hook.html"),
    ],
)
def test_pages_fit_a_phone(browser, page):
    open_page(browser, page, 390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("index.html", ".picture, .table-wrapper"),
        ("quality.html", "#the-front .table-wrapper"),
        ("choosing.html", "#in-one-minute .table-wrapper"),
    ],
)
def test_charts_and_tables_of_the_first_pages_are_whole_on_a_phone(browser, page, parts):
    """Nothing has to be scrolled sideways: the last columns, *kept* and *fewer*, are what one came for."""
    open_page(browser, page, 390)
    hidden = f"return [...document.querySelectorAll('{parts}')].map(each => each.scrollWidth - each.clientWidth)"
    found = browser.execute_script(hidden)
    assert found and max(found) <= 1
