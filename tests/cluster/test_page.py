"""The live page in a real headless Chromium, against a real service."""

import itertools
import json
import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Route, expect, sync_playwright

from tests.support.patience import LIMIT_S
from tests.support.running import Service

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: Debian's package chromium is missing"),
]
TOKENS = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=1e3 * LIMIT_S)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Browser, service: Service) -> Iterator[Page]:
    """Fails where the page, once left, had said anything on the console or asked elsewhere for anything."""
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1200, "height": 900})
    context.set_default_timeout(1e3 * LIMIT_S)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def stays_here(asked: Request) -> None:
        if not asked.url.startswith((service.http, "data:")):
            wrong.append(asked.url)

    page.on("request", stays_here)
    page.goto(service.http)
    yield page
    context.close()
    assert not wrong


def ask(page: Page, prompt: str = '[{"name": "') -> None:
    """Asks by keyboard alone, in rounds whether they pay on this machine or not."""
    page.locator("#mode").select_option("fixed")
    page.locator("#depth").fill("4")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type(prompt)
    page.locator("#tokens").fill(str(TOKENS))
    page.locator("#seed").fill("7")
    page.locator("#task").fill("json")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#summary")).to_contain_text("passes of the target")


def style(node: Locator, name: str) -> str:
    """Returns a style as it is shown."""
    value: str = node.first.evaluate("(node, name) => getComputedStyle(node)[name]", name)
    return value


def test_answer_arrives_token_by_token_coloured_by_origin(page: Page) -> None:
    ask(page)
    summary = page.locator("#summary").inner_text()
    assert page.locator("#answer .token").count() == int(re.match(r"(\d+) tokens in", summary)[1])  # type: ignore[index]
    origins = ("accepted", "target", "plain")
    assert len({style(page.locator(f"#answer .{name}"), "backgroundColor") for name in origins}) == 3
    accepted = int(re.search(r"(\d+) of \d+ drafted", summary)[1])  # type: ignore[index]
    assert page.locator("#answer .accepted").count() == accepted > 0


def test_answer_follows_the_schema_in_the_box_and_what_that_forced_is_coloured_apart(page: Page) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    page.locator("#schema").fill(json.dumps({**city, "additionalProperties": False}))
    ask(page, "A city: ")
    assert json.loads(page.locator("#answer").inner_text())["city"] in ("Rome", "Oslo")
    forced = page.locator("#answer .forced")
    expect(page.locator("#summary")).to_contain_text(f"{forced.count()} forced")
    assert forced.count() > 0
    legend = [page.locator(f".legend .{name}") for name in ("forced", "accepted", "target", "plain")]
    assert len({style(shown, "backgroundColor") for shown in legend}) == 4


def test_schema_that_is_no_json_is_told(page: Page) -> None:
    page.locator("#schema").fill("{")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#summary")).to_contain_text("is no JSON")
    expect(page.locator("#summary")).to_have_class("wrong")


def test_round_shows_its_draft_and_its_time_line(page: Page) -> None:
    ask(page)
    rounds = page.locator("#rounds li")
    assert rounds.count() > 2
    accepted = page.locator("#rounds .accepted").count()
    assert accepted == page.locator("#answer .accepted").count()
    first, second = rounds.nth(0), rounds.nth(1)
    line = first.locator(".time")
    expect(line).to_be_hidden()
    first.hover()
    expect(line).to_be_visible()
    expect(line).to_contain_text("target’s step")
    parts = [part.bounding_box() or {"width": 0.0} for part in line.locator("rect").all()]
    box = line.bounding_box()
    assert box is not None
    assert sum(part["width"] for part in parts) == pytest.approx(box["width"], abs=1)
    assert len({style(part, "fill") for part in line.locator("rect").all()}) == len(parts)
    page.mouse.move(0, 0)
    expect(line).to_be_hidden()
    first.focus()
    page.keyboard.press("ArrowDown")
    expect(second.locator(".time")).to_be_visible()


def test_corrected_draft_shows_what_stands_in_its_place(page: Page) -> None:
    ask(page, "The river was quiet and the")
    corrected = page.locator("#rounds li", has=page.locator(".refused")).first
    assert style(corrected.locator(".refused"), "textDecorationLine") == "line-through"
    own = corrected.locator(".target").inner_text()
    assert own not in corrected.locator(".refused").all_inner_texts()
    of_answer = page.locator("#answer .target").filter(has_text=own.strip("␣⏎")).first
    of_answer.hover()
    expect(page.locator("#rounds li.shown")).to_have_count(1)


def race(page: Page, *, kind: str = "json") -> None:
    page.locator("#race-tokens").fill("24")
    page.locator(f"#race [data-kind={kind}]").click()


def test_race_shows_both_texts_and_that_they_are_equal(page: Page) -> None:
    race(page)
    expect(page.locator("#race-result")).to_contain_text("same text")
    expect(page.locator("#race-result")).to_contain_text("times as fast")
    plain, speculation = (page.locator(f"#race-{side} .raced") for side in ("plain", "speculation"))
    assert plain.inner_text() == speculation.inner_text() != ""
    assert plain.locator(".plain").count() == plain.locator(".token").count() > 2
    for side in ("plain", "speculation"):
        expect(page.locator(f"#race-{side} .clock")).to_contain_text(
            re.compile(r"[\d.]+ s, \d+ tokens, \d+ tokens/s")
        )


def test_race_with_differing_texts_says_so(page: Page) -> None:
    def other_seed(route: Route) -> None:
        asked = json.loads(route.request.post_data or "")
        seed = 8 if asked["speculation"]["mode"] == "off" else 7
        route.continue_(post_data=json.dumps({**asked, "seed": seed, "temperature": 2}))

    page.route("**/v1/completions", other_seed)
    race(page, kind="prose")
    expect(page.locator("#race-result")).to_contain_text("THE TEXTS DIFFER")
    expect(page.locator("#race-result")).to_have_class("wrong")


def test_race_at_a_full_service_says_so(browser: Browser, service: Service) -> None:
    with browser.new_page() as page:
        refusal = {
            "status": 429,
            "headers": {"Retry-After": "2"},
            "json": {"error": {"message": "queue is full"}},
        }
        page.route("**/v1/completions", lambda route: route.fulfill(**refusal))  # type: ignore[arg-type]
        page.goto(service.http)
        race(page)
        expect(page.locator("#race-result")).to_have_text(
            "The service is full, try again in 2 s: queue is full"
        )


def test_race_offers_its_request_with_the_service_s_address(page: Page, service: Service) -> None:
    page.get_by_role("button", name="Copy as curl").click()
    assert f"{service.http.rstrip('/')}/v1/completions" in page.locator("#race-copy").input_value()
    page.get_by_role("button", name="Copy as Python").click()
    assert f'base_url="{service.http.rstrip("/")}/v1"' in page.locator("#race-copy").input_value()


def test_chart_shows_the_values_of_the_second_pointed_at(page: Page) -> None:
    chart = page.locator("figure").first
    expect(chart.locator(".values span")).to_have_count(3)
    chart.locator("svg").focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    expect(chart.locator("figcaption")).to_contain_text("2 s ago")
    expect(chart.locator("line.pointed")).to_have_count(1)


def test_charts_and_workers_are_live(page: Page, client: httpx.Client) -> None:
    """While somebody else's request is under way."""
    long = {"prompt": '{"name": "', "max_tokens": 1500, "ignore_eos": True, "task": "json", "stream": True}
    drafted = {"speculation": {"mode": "fixed", "depth": 4}}
    with client.stream("POST", "/v1/completions", json=long | drafted):
        expect(page.locator("figure")).to_have_count(4)
        for name in ("with speculation", "running", "json, model", "mean depth"):
            expect(page.locator("figure .names").get_by_text(name)).to_be_visible()
        for number in range(4):
            drawn = page.locator("figure").nth(number).locator("path").first
            expect(drawn).to_have_attribute("d", re.compile("L"))  # between two looks at least
            assert style(drawn, "stroke") != "none"
        expect(page.locator("#workers tr")).to_have_count(2)
        expect(page.locator("#workers tr", has_text="target")).to_contain_text(re.compile(r"\d+ % of \d+"))
        expect(page.locator("#status")).to_have_text("ok")


def test_page_adds_up_the_loads_of_several_gateways(page: Page, client: httpx.Client) -> None:
    """Whichever answers a look; each knows only its own requests."""
    real, looks = client.get("/loads").json(), itertools.count(1)
    tasks = {"task": "json", "drafter": "model", "reached": 0, "accepted": 0}

    def answer(route: Route) -> None:
        look = next(looks)
        running = (1, 2)[look % 2]
        route.fulfill(
            json={
                **real,
                "gateway": f"number {running}",
                "running": running,
                "uptime_s": look,
                "tasks": [{**tasks, "tokens": 10 * running * look}],
                "workers": [{**worker, "streams": running} for worker in real["workers"]],
            }
        )

    page.route("**/loads", answer)
    expect(page.locator("figure .names").get_by_text("running 3")).to_be_visible()
    expect(page.locator("figure .names").get_by_text("with speculation 30")).to_be_visible()
    expect(page.locator("#workers tr").first.locator("td").nth(3)).to_have_text("3")


def test_page_shows_which_of_several_drafters_drafts_what_and_why(page: Page, client: httpx.Client) -> None:
    real = client.get("/loads").json()
    task = {"task": "code", "drafter": "auto", "tokens": 9, "reached": 8, "accepted": 6}
    told = {
        "routed": {"ours": {"times": {"measured": 3}}},
        "drafted_by": {"ours": {"rounds": 4, "drafted": 9, "reached": 8, "accepted": 6}},
        "judged": {"suffix": {"reached": 4, "correct": 1}},
    }
    expect(page.locator("#routing")).to_be_hidden()  # the only drafter of this deployment drafts everything
    page.route("**/loads", lambda route: route.fulfill(json={**real, "tasks": [{**task, **told}]}))
    expect(page.locator("#routes tr").first).to_have_text("codeoursmeasured 3475 %–")
    expect(page.locator("#routes tr").last).to_have_text("codesuffix–0–25 %")


def test_page_shows_the_progress_of_a_new_draft(page: Page, client: httpx.Client) -> None:
    real = client.get("/loads").json()
    told = {
        "draft": "next",
        "task": "code",
        "verification": "coupled",
        "share": 0.125,
        "seen": 20,
        "needed": 96,
        "tokens_per_second": 51.4,
        "others_tokens_per_second": 0,
        "changes": {"0": 1, "0.125": 2},
    }
    expect(page.locator("#rolling-out")).to_be_hidden()
    page.route("**/loads", lambda route: route.fulfill(json={**real, "rollouts": [told]}))
    expect(page.locator("#rollouts tr")).to_have_text("codenext12.5 %20 of 9651–1")


def test_running_configuration_is_what_the_workers_run_with(page: Page) -> None:
    page.get_by_text("Running configuration").click()

    def settings(of: str) -> dict[str, str]:
        group = page.locator("#settings section", has=page.get_by_role("heading", name=of))
        names, values = (group.locator(tag).all_inner_texts() for tag in ("dt", "dd"))
        return dict(zip(names, values, strict=True))

    expect(page.locator("#settings section")).to_have_count(4)
    target, draft = settings("target at"), settings("draft at")
    assert target["dtype"] == draft["dtype"] == "float32"
    assert (target["threads"], target["cache_memory"]) == ("1", str(2**28))
    assert (target["draft_ahead"], draft["draft_ahead"]) == ("0", "12")
    assert settings("gateway")["drafters"] == '["model"]'
    assert settings("pace")["max_depth"] == "8"


def test_escape_stops_an_answer(page: Page) -> None:
    long = {"type": "array", "items": {"type": "integer"}, "minItems": 500}  # it cannot end by itself before
    page.locator("#schema").fill(json.dumps(long))
    page.locator("#tokens").fill("1500")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer .token").nth(5)).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator("#summary")).to_contain_text("stopped after")
    assert page.locator("#answer .token").count() < 1500


def test_page_asks_for_a_key_if_keys_are_needed(browser: Browser, service: Service) -> None:
    def door(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "give an API key"}})

    with browser.new_page() as page:
        page.route("**/loads", door)
        page.goto(service.http)
        expect(page.locator("#status")).to_have_text("give an API key")
        page.locator("#key").fill("secret")
        expect(page.locator("#status")).to_have_text("ok")


def test_phone_s_width_needs_no_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for control in page.locator(":is(input, select, textarea, button):visible").all():
        box = control.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360


def test_text_can_be_read(page: Page) -> None:
    """Contrast of 4.5 to 1, as WCAG asks for; light on dark where the visitor has it dark."""
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    for kind in ("accepted", "forced", "target", "refused", "unreached", "plain"):
        ink, ground = page.locator(f".legend .{kind}").first.evaluate(
            """node => {
                const over = element => {
                    const colour = getComputedStyle(element).backgroundColor;
                    return colour === "rgba(0, 0, 0, 0)" ? over(element.parentElement) : colour;
                };
                return [getComputedStyle(node).color, over(node)];
            }"""
        )
        dark, light = sorted((luminance(ink), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (kind, ink, ground)
        assert (luminance(ink) > luminance(ground)) == is_dark


def luminance(colour: str) -> float:
    """Returns the luminance of rgb(r, g, b), as WCAG defines it."""
    parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
