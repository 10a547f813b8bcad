"""The live page in a browser: it loads, follows the engine, answers to keys, fits a phone, and takes no text for markup."""

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.browser import FLAGS, chromium, colours, load, open_live, resize, text, until
from tests.server.process import EchoProcess


@pytest.fixture(scope="module")
def server():
    with EchoProcess(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_errors(browser):
    """Nothing in the console in any test, but for answers that a test asks for."""
    browser.get_log("browser")
    yield
    assert [line["message"] for line in browser.get_log("browser") if "401" not in line["message"]] == []


def test_it_says_what_it_shows(browser, server):
    open_live(browser, server.url)
    assert browser.title == "dcpjax"
    assert "tiny · tp 1 × dcp 4 · 192 pages of 64 tokens" in text(browser, "about")
    assert text(browser, "running") == "0" and text(browser, "length") == "none yet"
    assert "free 192" in text(browser, "pages-legend")


def test_it_follows_the_engine(browser, server):
    open_live(browser, server.url)
    with load(server.url):
        until(browser, lambda b: int(text(b, "running")) > 1)
        until(browser, lambda b: float(text(b, "generated").replace(",", "")) > 10)
        until(browser, lambda b: "in use 0" not in text(b, "pages-legend"))
        until(browser, lambda b: "shared 0" not in text(b, "pages-legend"))
        until(browser, lambda b: float(text(b, "hit-rate").split()[0]) > 5)
        # The echo's drafts are all right, but for those behind an end.
        length, of, most = text(browser, "length").split()
        assert 3 < float(length) <= 4 and (of, most) == ("of", "4")
        shares = text(browser, "places").split()
        assert shares[1::2] == ["1", "2", "3"] and all(80 < int(share.rstrip("%")) <= 100 for share in shares[::2])
        assert float(text(browser, "step-ms").split()[0]) > 0
    until(browser, lambda b: text(b, "running") == "0" and "in use 0" in text(b, "pages-legend"))
    assert "cached 0" not in text(browser, "pages-legend")


def test_a_chat_by_keyboard_alone(browser, server):
    open_live(browser, server.url)
    body = browser.find_element(By.TAG_NAME, "body")
    for _ in range(12):
        body = browser.switch_to.active_element
        if body.get_attribute("id") == "ask":
            break
        body.send_keys(Keys.TAB)
    assert body.get_attribute("id") == "ask"
    body.send_keys("one two three four five six seven eight nine ten")
    body.send_keys(Keys.CONTROL, Keys.ENTER)
    until(browser, lambda b: "accepted drafts" in text(b, "talk"))
    said = text(browser, "talk")
    assert said.count("one two three four five six seven eight nine ten") == 2
    runs = browser.find_elements(By.CSS_SELECTOR, "#talk .run")
    assert 0 < len(runs) < 10  # several tokens a step, and steps that come at once are one run
    assert browser.find_element(By.ID, "send").is_enabled()


def test_the_map_is_read_with_arrow_keys(browser, server):
    open_live(browser, server.url)
    field = browser.find_element(By.ID, "map")
    field.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, "cell").startswith("Page 2: ")
    assert "rows by rank: " in text(browser, "cell")
    field.send_keys(Keys.ARROW_DOWN)
    assert int(text(browser, "cell").split()[1].rstrip(":")) > 3
    for _ in range(3):
        field.send_keys(Keys.ARROW_UP, Keys.ARROW_LEFT)
    assert text(browser, "cell").startswith("Page 1: ")
    outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert browser.switch_to.active_element == field and outline != "none"


def test_text_is_never_markup(browser, server):
    open_live(browser, server.url)
    field = browser.find_element(By.ID, "ask")
    field.send_keys("<img src=x onerror=alert(1)> <b>bold</b>")
    browser.find_element(By.ID, "send").click()
    until(browser, lambda b: "accepted drafts" in text(b, "talk"))
    assert text(browser, "talk").count("<b>bold</b>") == 2
    assert not browser.find_elements(By.CSS_SELECTOR, "#talk img, #talk b")


def test_errors_are_shown(browser, server):
    open_live(browser, server.url)
    browser.execute_script("turns.push({ role: 'nobody', content: 'x' })")
    browser.find_element(By.ID, "ask").send_keys("hello", Keys.CONTROL, Keys.ENTER)
    until(browser, lambda b: "role" in text(b, "talk"))
    browser.get_log("browser")  # the refused request


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(browser, server, scheme):
    colours(browser, scheme)
    resize(browser, 360)
    try:
        open_live(browser, server.url)
        wide = browser.execute_script(
            "return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 360.5).length"
        )
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360 and wide == 0
        ground, ink = (
            browser.execute_script(f"return getComputedStyle(document.body).{name}")
            for name in ("backgroundColor", "color")
        )
        assert (_light(ground) > _light(ink)) == (scheme == "light")
        assert abs(_light(ground) - _light(ink)) > 150
    finally:
        resize(browser, 1200)
        colours(browser, "light")


def _light(colour: str) -> float:
    return sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) / 3


def test_a_key_lets_the_page_in(browser):
    with EchoProcess("--api-key", "secret") as server:
        browser.get(server.url)
        until(browser, lambda b: text(b, "state") == "an API key is wanted")
        browser.find_element(By.ID, "key").send_keys("secret", Keys.TAB)
        until(browser, lambda b: text(b, "state") == "live")
        assert "cells" not in httpx.get(f"{server.url}/live").text
        browser.get("about:blank")


def test_the_page_follows_a_server_that_ends(browser):
    with EchoProcess() as server:
        open_live(browser, server.url)
        server.signal()
        until(browser, lambda b: b.find_element(By.ID, "state").get_attribute("data-state") == "lost")
        server.wait()
    browser.get("about:blank")
    browser.get_log("browser")  # the connection that was refused


def test_nothing_from_elsewhere(server):
    answer = httpx.get(server.url)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text and "https://" not in answer.text and "innerHTML" not in answer.text


def test_snapshots_end_when_asked(server):
    lines = httpx.get(f"{server.url}/live?count=2", timeout=5).text.splitlines()
    assert len(lines) == 3
    for bad in ("0", "-1", "x", "²"):
        answer = httpx.get(f"{server.url}/live", params={"count": bad})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "count"


def test_without_dev_endpoints_there_is_no_page():
    with EchoProcess("--no-enable-dev-endpoints") as server:
        assert httpx.get(server.url).status_code == 404
        assert httpx.get(f"{server.url}/live").status_code == 404
