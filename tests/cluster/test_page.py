"""The live page in a real headless Chromium, against a real service."""

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bench.running import Service

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: Debian's package chromium is missing"),
]
ANSWERED_MS = 30_000
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=SCHEMES)
def page(request: pytest.FixtureRequest, browser: Browser, service: Service) -> Iterator[Page]:
    """Fails where the page, once left, had said anything on the console or asked elsewhere for anything."""
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((service.http, "data:")) or wrong.append(asked.url))
    page.goto(service.http)
    yield page
    context.close()
    assert not wrong


def ask(page: Page, tokens: int = 60) -> None:
    """By keyboard alone."""
    page.locator("#prompt").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type('{"name": "')
    page.locator("#tokens").fill(str(tokens))
    page.locator("#seed").fill("7")
    page.locator("#task").fill("json")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#summary")).to_contain_text("passes of the target", timeout=ANSWERED_MS)


def background(page: Page, selector: str) -> str:
    colour: str = page.locator(selector).first.evaluate("node => getComputedStyle(node).backgroundColor")
    return colour


def test_an_answer_arrives_token_by_token_coloured_by_origin(page: Page) -> None:
    ask(page)
    tokens = page.locator("#answer .token")
    assert tokens.count() == 60
    colours = {name: background(page, f"#answer .{name}") for name in ("accepted", "target", "plain")}
    assert len({*colours.values()}) == 3
    accepted = int(re.search(r"(\d+) of \d+ drafted", page.locator("#summary").inner_text())[1])  # type: ignore[index]
    assert page.locator("#answer .accepted").count() == accepted > 0


def test_a_round_shows_its_draft_and_its_time_line(page: Page) -> None:
    ask(page)
    rounds = page.locator("#rounds li")
    assert rounds.count() > 2
    accepted = page.locator("#rounds .accepted").count()
    assert accepted == page.locator("#answer .accepted").count()
    first, second = rounds.nth(0), rounds.nth(1)
    expect(first.locator(".time")).to_be_hidden()
    first.hover()
    expect(first.locator(".time")).to_contain_text("target’s step")
    page.mouse.move(0, 0)
    first.focus()
    page.keyboard.press("ArrowDown")
    expect(second.locator(".time")).to_be_visible()


def test_charts_workers_and_settings_are_live(page: Page) -> None:
    ask(page)
    lines = page.locator("figure path")
    expect(page.locator("figure")).to_have_count(4)
    for name in ("with speculation", "running", "json, model"):
        expect(page.locator("figure .names").get_by_text(name)).to_be_visible()
    expect(page.locator("figure path").first).to_have_attribute("d", re.compile(".{20,}"))
    assert lines.count() >= 4
    expect(page.locator("#workers tr")).to_have_count(2)
    expect(page.locator("#status")).to_have_text("ok")
    page.get_by_text("Running configuration").click()
    expect(page.locator("#settings")).to_contain_text("pace.max_depth")


def test_escape_stops_an_answer(page: Page) -> None:
    page.locator("#tokens").fill("1500")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer .token").nth(5)).to_be_attached(timeout=ANSWERED_MS)
    page.keyboard.press("Escape")
    expect(page.locator("#summary")).to_contain_text("stopped after")


def test_a_phone_s_width_needs_no_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for control in page.locator("input:visible, select, textarea, button").all():
        box = control.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read(browser: Browser, service: Service, scheme: str) -> None:
    """Contrast of 4.5 to 1, as WCAG asks for."""
    context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(service.http)
    for kind in ("accepted", "target", "refused", "plain"):
        ink, ground = page.locator(f".legend .{kind}").first.evaluate(
            """node => {
                const over = element => {
                    const colour = getComputedStyle(element).backgroundColor;
                    return colour === "rgba(0, 0, 0, 0)" ? over(element.parentElement) : colour;
                };
                return [getComputedStyle(node).color, over(node)];
            }"""
        )
        assert contrast(ink, ground) >= 4.5, (kind, ink, ground)
    context.close()


def contrast(one: str, other: str) -> float:
    """Of two colours as rgb(r, g, b)."""

    def luminance(colour: str) -> float:
        parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
