"""A headless Chromium for tests of the page. `python -m tests.server.browser FOLDER` saves pictures of the page.

Where `.ci/run` runs there must be one; elsewhere the tests are left out if there is none, and say what to install.
"""

import contextlib
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.server.process import EchoProcess

MISSING = "needs a browser: apt install chromium chromium-driver"


@contextlib.contextmanager
def chromium(width: int = 1200, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A browser window of this size in CSS pixels."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or browser is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        resize(opened, width, height)
        yield opened
    finally:
        opened.quit()


def resize(browser: webdriver.Chrome, width: int, height: int = 900) -> None:
    """To widths too that no window has."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )


def colours(browser: webdriver.Chrome, scheme: str) -> None:
    """ "light" or "dark"."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def until(browser: webdriver.Chrome, condition, seconds: float = 15.0):
    return WebDriverWait(browser, seconds, 0.1).until(condition)


def text(browser: webdriver.Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def open_live(browser: webdriver.Chrome, url: str) -> None:
    browser.get(url)
    until(browser, lambda b: text(b, "state") == "live")


@contextlib.contextmanager
def load(url: str, clients: int = 6) -> Iterator[None]:
    """Chats without end, half of them with a beginning in common."""
    stop = threading.Event()

    def chat(number: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                words = f"{'The same beginning of a long question. ' * 40 if number % 2 else ''} {number} {turn} " * 2
                body = {"messages": [{"role": "user", "content": words + "word " * 60}], "max_tokens": 120}
                client.post("/v1/chat/completions", json=body)

    threads = [threading.Thread(target=chat, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


FLAGS = (
    "--decode-context-parallel-size", "4", "--num-gpu-blocks-override", "193", "--max-num-seqs", "4",
    "--speculative-config", '{"num_speculative_tokens":3}',
)  # fmt: skip


def main(folder: pathlib.Path) -> None:
    with EchoProcess(*FLAGS) as server, chromium(1200, 1350) as browser:
        open_live(browser, server.url)
        browser.save_screenshot(folder / "page.png")
        with load(server.url):
            until(browser, lambda b: int(text(b, "running")) > 1 and float(text(b, "generated").replace(",", "")) > 0)
            browser.find_element(By.ID, "ask").send_keys("What does this page show?")
            browser.find_element(By.ID, "send").click()
            until(browser, lambda b: "accepted drafts" in text(b, "talk"))
            until(browser, lambda b: int(text(b, "running")) > 1)
            browser.execute_script("window.scrollTo(0, 0)")
            browser.save_screenshot(folder / "page-load.png")
            colours(browser, "dark")
            resize(browser, 360, 2600)
            until(browser, lambda b: int(text(b, "running")) > 1)
            browser.save_screenshot(folder / "page-narrow.png")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
