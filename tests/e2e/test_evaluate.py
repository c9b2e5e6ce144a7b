"""`driftwatch profile` and `driftwatch evaluate` as a user types them, and the page as a browser shows it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.e2e.machine import CHAIN, DATA, TRACE, Machine, free_port, until

TARGET = DATA / "models" / "target"
COSTS = """
batches:
  - {batch: 1, step_ms: 20, c: 0.05, v: {1: 1.0, 4: 1.05, 8: 1.1}, context: 40}
  - {batch: 1, step_ms: 20.5, c: 0.05, v: {1: 1.0, 4: 1.05, 8: 1.1}, context: 2000}
  - {batch: 32, step_ms: 28, c: 0.05, v: {1: 1.3, 4: 2.1, 8: 3.1}, context: 40}
"""


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "driftwatch", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DRIFTWATCH_SHADOW__DEVICE": "cpu"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def evaluated(*arguments: str | Path, cwd: Path) -> dict[str, Any]:
    done = run("evaluate", TRACE, *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a profile as `driftwatch profile` writes it, costs as a person writes them, and a report of those."""
    made = tmp_path_factory.mktemp("evaluate")
    (made / "costs.yaml").write_text(COSTS)
    shapes = ["--batch", "1", "--batch", "2", "--context", "16", "--context", "128", "--gamma", "2", "--gamma", "5"]
    done = run("profile", "--target", TARGET, "--draft", CHAIN, *shapes, "--out", "profile.json", cwd=made)
    assert done.returncode == 0, done.stderr
    assert "fit of 16 points: relative error" in done.stdout
    options: list[str | Path] = ["--draft", CHAIN, "--target", TARGET, "--profile", "costs.yaml", "--by", "domain"]
    done = run("evaluate", TRACE, *options, "--price-per-gpu-hour", "3", "--html", "report.html", cwd=made)
    assert done.returncode == 0, done.stderr
    (made / "report.txt").write_text(done.stdout)
    return made


def test_a_measured_profile_is_bound_to_its_models(folder: Path) -> None:
    found = evaluated("--draft", CHAIN, "--profile", "profile.json", "--gamma", "3", cwd=folder)
    assert found["costs"]["origin"] == "measured"
    assert found["costs"]["bound"]["dtype"] == "float32"
    other = DATA / "models" / "target"
    refused = run("evaluate", TRACE, "--draft", other, "--profile", "profile.json", cwd=folder)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("measure one with `driftwatch profile`")
    assert len(refused.stderr.strip().splitlines()) == 1


def test_the_report_for_people(folder: Path) -> None:
    text = (folder / "report.txt").read_text()
    for title in ("1. The target alone", "2. Acceptance", "3. Time with speculation", "4. Cost"):
        assert text.count(title) == 3  # all, domain=A, domain=B
    assert "predicted from the cost profile" in text
    assert "verdict: use, gamma 5" in text
    assert "was run and not replayed: the target decoded 20 of the records again" in text


def test_the_batch_turns_the_verdict(folder: Path) -> None:
    """The same acceptance pays at batch 1 and costs at batch 32."""
    options: list[str | Path] = ["--draft", CHAIN, "--profile", "costs.yaml", "--by", "domain"]
    for batch, decision in (("1", "use"), ("32", "use_with_gamma")):
        found = evaluated(*options, "--batch", batch, cwd=folder)
        assert found["segments"][0]["verdict"]["decision"] == decision
    values = {value["gamma"]: value["speedup"] for value in found["segments"][0]["acceptance"][0]["values"]}
    assert values[8][2] < 1.0  # gamma 8 loses there, by its upper limit
    assert [one["segment"] for one in found["segments"]] == ["all", "domain=A", "domain=B"]


def test_without_a_draft_it_says_what_one_would_need(folder: Path) -> None:
    (found,) = evaluated("--profile", "costs.yaml", cwd=folder)["segments"]
    assert [one["kind"] for one in found["acceptance"]] == ["ngram"]
    assert found["verdict"]["decision"] in ("use", "use_with_gamma")  # prompt lookup pays on these texts
    assert found["room"]["needs"][2]["hit_rate"] < found["room"]["needs"][2]["hit_rate_for_gain"]


def test_without_costs_there_is_no_verdict(folder: Path) -> None:
    (found,) = evaluated("--draft", CHAIN, cwd=folder)["segments"]
    assert found["verdict"]["decision"] == "not_enough_data"
    assert found["acceptance"][0]["gamma"]["3"]["acceptance_length"][0] > 2.0
    assert found["acceptance"][0]["values"] == []


def test_engines_are_measured(machine: Machine, folder: Path) -> None:
    """A step of 4 ms against a window of 6 ms with the tokens that a real engine accepted: about 1.5 times as fast."""
    ports = {name: free_port() for name in ("plain", "speculative")}
    script = Path(__file__).parent / "paced.py"
    for name, port in ports.items():
        machine.start(name, sys.executable, str(script), str(port), str(TRACE), name)
        machine.wait_for(f"http://127.0.0.1:{port}/v1/models")
    urls = [f"http://127.0.0.1:{port}" for port in ports.values()]
    options = ["--engine-url", urls[0], "--engine-url-speculative", urls[1], "--requests", "24", "--gamma", "3"]
    report = evaluated("--draft", CHAIN, *options, "--batch", "2", "--price-per-gpu-hour", "3", cwd=folder)
    (found,) = report["segments"]
    assert (found["baseline"]["source"], found["wall_clock"]["source"]) == ("measured", "measured")
    assert found["verdict"]["decision"] == "use"
    assert "measured speedup" in found["verdict"]["reasons"][0]
    assert report["costs"]["origin"] == "engine"
    assert found["cost"]["speculative"][0] < found["cost"]["plain"]
    assert f"plain: 24 of 24 prompts timed at {urls[0]}, 2 at once" in report["notes"]
    assert found["verdict"]["about"] == "the engine's own speculation"


def test_price_and_device_come_from_the_settings_unless_said(folder: Path) -> None:
    (folder / "settings.yaml").write_text("value: {gpu_hour_price: 4, gpus: 2}\n")
    options: list[str | Path] = ["--draft", CHAIN, "--profile", "costs.yaml", "--config", "settings.yaml"]
    (set_,) = evaluated(*options, cwd=folder)["segments"]
    (said,) = evaluated(*options, "--price-per-gpu-hour", "1", cwd=folder)["segments"]
    assert set_["cost"]["plain"] == pytest.approx(4 * said["cost"]["plain"])
    assert set_["baseline"]["per_million"] == pytest.approx(set_["cost"]["plain"], rel=1e-3)


@pytest.mark.parametrize("command", ["evaluate", "profile"])
def test_what_is_interrupted_writes_nothing(tmp_path: Path, command: str) -> None:
    """Ctrl-C in the middle of the work, once the file that is to be written has been opened beside its name."""
    arguments = {
        "evaluate": [TRACE, "--draft", CHAIN, "--target", TARGET, "--html", "out"],
        "profile": ["--target", TARGET, "--draft", CHAIN, "--out", "out"],
    }[command]
    (tmp_path / "out").write_text("of an earlier run")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DRIFTWATCH_SHADOW__DEVICE": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-m", "driftwatch", command, *map(str, arguments)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(list(tmp_path.iterdir())) > 1 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "driftwatch: interrupted")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "of an earlier run")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", TRACE, "--profile", "none.json"], "none.json: No such file"),
        (["evaluate", TRACE, "--profile", "bad.yaml"], "bad.yaml: unknown key `bathces`"),
        (["evaluate", TRACE, "--engine-url-speculative", "http://x"], "give the plain engine with --engine-url"),
        (["evaluate", TRACE, "--engine-url", "http://127.0.0.1:9"], "engine http://127.0.0.1:9"),
        (["evaluate", "empty.jsonl"], "no request to evaluate: the files hold no records"),
        (["profile", "--target", "nowhere"], "nowhere"),
        (["profile"], "give --target, or engines with --engine-url"),
        (["profile", "--engine-url", "http://127.0.0.1:9", "--draft", CHAIN], "leave out --draft, --batch"),
        (["profile", "--target", TARGET, "--out", "no/such/p.json"], "--out no/such/p.json: No such file"),
        (["evaluate", TRACE, "--html", "no/such/p.html"], "--html no/such/p.html: No such file"),
        (["evaluate", TRACE, "--hidden-states", "{}", "--target", TARGET], "--hidden-states: url: Field required"),
        (["profile", "--engine-url", "http://127.0.0.1:9", "--seconds", "1"], "engine http://127.0.0.1:9/metrics"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str | Path], message: str) -> None:
    (tmp_path / "bad.yaml").write_text("bathces: []\n")
    (tmp_path / "empty.jsonl").write_text("")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert message in line


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        yield driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(browser: Browser, folder: Path, width: int, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"file://{folder / 'report.html'}")
    assert asked == [f"file://{folder / 'report.html'}"]  # it asks nobody for anything
    assert said == []
    assert page.get_by_role("heading", level=1).inner_text() == "Does speculation pay on these requests?"
    # Nothing sticks out at the side, closed segments open by the keyboard, plots have a text and a size.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    closed = page.locator("details:not([open]) > summary").first
    closed.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 2
    plots = page.get_by_role("img")
    assert plots.count() == 6
    for plot in plots.all():
        box = plot.bounding_box()
        assert box is not None
        assert box["width"] > 250
        assert re.search(r"\d", plot.get_attribute("aria-label") or "")
    contrasts = page.evaluate(CONTRAST)
    assert min(contrasts) >= 4.5, "WCAG 2.1, 1.4.3"
    context.close()


CONTRAST = """() => {
  const parse = c => c.match(/[\\d.]+/g).slice(0, 4).map(Number);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                       return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
                        if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
  return [...document.querySelectorAll('p, th, td, h1, h2, h3, small, caption, .badge, figcaption, svg text')]
    .filter(e => e.textContent.trim() && e.getClientRects().length)
    .map(e => { const s = getComputedStyle(e);
                const fore = parse(e instanceof SVGElement ? s.fill : s.color).slice(0, 3);
                const [a, b] = [light(fore), light(ground(e))].sort((x, y) => y - x);
                return (a + .05) / (b + .05); });
}"""
