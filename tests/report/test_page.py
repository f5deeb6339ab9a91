"""Pages: well-formed, escaped, small, and opened in a browser; the command that draws them."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from lightning_loco.report.charts import LANE_LEFT, LANE_WIDTH, NUM_COLORS
from lightning_loco.report.page import (
    flat,
    goodput_chart,
    render_comparison,
    render_run,
    share_row,
    write_report,
)
from lightning_loco.report.record import RunRecord
from tests.harness.programs import environment
from tests.harness.sources import ROOT
from tests.report.records import EVIL, made_up

VOID = {"meta", "img", "br", "link", "input"}
TEMPLATES = ROOT / "lightning_loco" / "report" / "templates"


class Page(HTMLParser):
    """A page as a browser parses it: its elements, its text, and whether it is well-formed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_a_page_shows_what_is_recorded() -> None:
    page = Page(render_run(made_up()))
    captions = [
        "Loss against local steps",
        "Loss against time",
        "Loss against bytes",
        "Learning rate",
        "Consensus distance",
        "metric ring",
        "The whole run",
        "Some rounds",
    ]
    assert [text for text in captions if text not in page.text] == []
    lines = [line["data-name"] for line in page.named("polyline")]
    # On a linear and a logarithmic axis, against steps, time and bytes.
    assert lines.count("training, mean of 2 workers") == 6
    assert lines.count("training, worker 0 ring") == 6
    assert lines.count("training, if every step had sent what DDP sends") == 2
    assert "consensus ring0.025at step 40" in page.text.replace("\n", "")
    assert "DDP: 4.0 MB, 400 times as much" in page.text
    assert "Spectral gap 0.25: the distance to the mean shrinks by a factor of 0.75" in page.text
    assert "Of 7 events in between only the sums below are known" in page.text
    assert "strategy.sync_every" in page.text


def test_bars_of_goodput_are_as_long_as_the_shares() -> None:
    chart = goodput_chart(made_up())
    assert chart is not None
    assert [lane.name for lane in chart.lanes] == ["all", "worker 0 ring", "worker 1 ring"]
    width = LANE_WIDTH - 15 - LANE_LEFT
    shares = [
        {"goodput": 0.75, "waiting": 0.125, "lost": 0.0625, "restarting": 0.0625},
        {"goodput": 0.5, "waiting": 0.25, "lost": 0.125, "restarting": 0.125},
        {"goodput": 1.0},
    ]
    for lane, expected in zip(chart.lanes, shares, strict=True):
        bars = {part: path.partition(" 0h") for part, path in lane.paths}
        lengths = {part: float(length) / width for part, (_, _, length) in bars.items()}
        assert lengths == pytest.approx(expected, abs=1e-4)
        starts = [float(start.removeprefix("M")) for start, _, _ in bars.values()]
        assert starts == sorted(starts)
    page = Page(render_run(made_up()))
    assert "What the time was for" in page.text
    assert "goodput75.0%of the time" in page.text.replace("\n", "")


def test_a_page_of_an_empty_record() -> None:
    page = Page(render_run(RunRecord("nothing")))
    assert "nothing" in page.text
    assert not page.named("polyline")


def test_text_of_a_run_is_never_read_as_html(tmp_path: Path) -> None:
    records = {EVIL: made_up(text=EVIL), "other": made_up(text="x")}
    for html in (render_run(records[EVIL]), render_comparison(records)):
        page = Page(html)
        assert len(page.named("script")) == 1
        assert page.named("img") == []
        assert EVIL in page.text
        assert "alert(1)" not in html.replace(
            "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;", ""
        )
        assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]


def test_a_page_needs_nothing_else() -> None:
    html = render_run(made_up())
    page = Page(html)
    assert not [a for _, attributes in page.elements for a in attributes if a in ("src", "href")]
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in str(page.named("meta"))


def test_a_long_run_of_many_workers_is_a_small_page(tmp_path: Path) -> None:
    page = write_report(made_up(num_workers=64, num_steps=2000), tmp_path)
    assert page.stat().st_size < 5e6
    names = [line["data-name"] for line in Page(page.read_text()).named("polyline")]
    assert "training, worker 0 ring" not in names
    assert "training, mean of 64 workers" in names
    few = write_report(made_up(num_workers=4, num_steps=10_000), tmp_path)
    assert few.stat().st_size < 1e6


def test_percentages_add_up() -> None:
    thirds = share_row({"compute": 1.0, "validation": 1.0, "wait": 1.0, "round": 2.0})
    assert thirds == {
        "compute": "1 s (34%)",
        "validation": "1 s (33%)",
        "wait": "1 s (33%)",
        "round": "2 s",
    }
    assert share_row({"compute": 0.0}) == {"compute": "0 s (0%)"}


def test_settings_without_a_value_are_left_out() -> None:
    record = RunRecord("x", settings={"a": {"b": None, "c": False, "_convert_": "all"}, "d": {}})
    assert list(flat(record.settings)) == [("a.c", "False")]


EYES = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""Linear red, green and blue as seen by readers (Machado, Oliveira and Fernandes 2009)."""


def oklab(rgb: torch.Tensor) -> torch.Tensor:
    """Convert to Oklab (Ottosson 2020), where distances are roughly perceptual."""
    to_cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    to_lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    cones = (rgb @ torch.tensor(to_cones).T).clamp(0) ** (1 / 3)
    return cones @ torch.tensor(to_lab).T


def test_colors_can_be_told_apart(subtests: pytest.Subtests) -> None:
    light, dark = (TEMPLATES / "style.css").read_text().split("prefers-color-scheme: dark")
    groups = {"lines": r"--c\d", "timeline": "--k-(?:compute|validation|checkpoint|sync|wait)"}
    for (theme, css), (group, name), (eye, matrix) in itertools.product(
        {"light": light, "dark": dark}.items(), groups.items(), EYES.items()
    ):
        with subtests.test(theme=theme, group=group, eye=eye):
            found = re.findall(rf"{name}: #(\w{{6}})", css)
            assert len(found) == (NUM_COLORS if group == "lines" else 5)
            rgb = torch.tensor([list(bytes.fromhex(color)) for color in found]) / 255
            rgb = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
            seen = oklab((rgb @ torch.tensor(matrix).float().T).clamp(0, 1))
            assert torch.pdist(seen).min() > 0.09  # 0.076 for the colors of Okabe and Ito


def test_runs_are_compared() -> None:
    first, second = made_up(), made_up(num_steps=80)
    second.settings["strategy"]["sync_every"] = 8
    page = Page(render_comparison({"a": first, "b": second}))
    assert [line["data-name"] for line in page.named("polyline")] == ["a", "b"] * 12
    assert "Settings that differ" in page.text
    assert "strategy.sync_every" in page.text
    assert "DDP would send" in page.text


# ------------------------------------------------------------------------- a browser


def opened(page: Path, tmp_path: Path) -> tuple[str, str]:
    """Return the elements of a page after its script has run, and the errors of the browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("There is no Chromium here.")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.process
def test_a_browser_opens_the_page_without_complaints(tmp_path: Path) -> None:
    dom, complaints = opened(write_report(made_up(text=EVIL), tmp_path), tmp_path)
    assert "Loss against bytes" in dom
    assert complaints == ""


@pytest.mark.process
def test_values_are_shown_under_the_pointer(tmp_path: Path) -> None:
    html = render_run(made_up())
    # A script of a test is not allowed on the page, so this copy allows all.
    policy = html[html.index('<meta http-equiv="Content-Security-Policy"') :].split("\n")[0]
    moves = """<script>
const svg = document.querySelector(".plot > svg"), frame = svg.getBoundingClientRect();
const at = {clientX: frame.left + 0.3 * frame.width, clientY: frame.top + 9, bubbles: true};
svg.dispatchEvent(new PointerEvent("pointermove", at));
</script>"""
    page = tmp_path / "page.html"
    page.write_text(html.replace(policy, "").replace("</body>", f"{moves}</body>"))
    dom, complaints = opened(page, tmp_path)
    assert complaints == ""
    tip = dom.split('<div class="tip"', 2)[1].split("</figure>")[0]
    assert "local step:" in tip
    assert "training, mean of 2 workers: " in tip
    assert "training, worker 1 ring: " not in tip


@pytest.mark.process
def test_workers_and_logarithms_are_shown_on_demand(tmp_path: Path) -> None:
    html = render_run(made_up())
    policy = html[html.index('<meta http-equiv="Content-Security-Policy"') :].split("\n")[0]
    look = """<script>
const visible = (selector) => [...document.querySelectorAll(selector)].filter(
  (one) => one.getClientRects().length).length;
const points = () => document.querySelector(".losses polyline").getAttribute("points");
const found = [visible("polyline.worker"), visible(".face.log"), visible(".face.linear")];
const before = points(), slider = document.querySelector("#smoothing input");
document.querySelector("#workers").click();
document.querySelector(".losses .log-box").click();
slider.value = 0.9;
slider.dispatchEvent(new Event("input"));
found.push(visible("polyline.worker"), visible(".face.log"), visible(".face.linear"));
found.push(points() !== before);
document.title = JSON.stringify(found);
</script>"""
    page = tmp_path / "page.html"
    page.write_text(html.replace(policy, "").replace("</body>", f"{look}</body>"))
    dom, complaints = opened(page, tmp_path)
    assert complaints == ""
    assert "<title>[0,0,6,6,1,5,true]</title>" in dom


# ------------------------------------------------------------------------ the command


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "command.py"), "report", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.process
def test_the_command(tmp_path: Path) -> None:
    for name, steps in (("a", 40), ("b", 80)):
        write_report(made_up(num_steps=steps), tmp_path / name)
    (tmp_path / "a" / "report.html").unlink()
    again = command("a", folder=tmp_path)
    assert (again.returncode, again.stdout) == (0, "Wrote a/report.html\n")
    assert (tmp_path / "a" / "report.html").read_text() == render_run(
        RunRecord.load(tmp_path / "a")
    )
    both = command("a", "b/run.json", folder=tmp_path)
    assert both.returncode == 0, both.stderr
    assert "b/run.json" in (tmp_path / "comparison.html").read_text()
    named = command("a", "b", "--output", "page.html", folder=tmp_path)
    assert named.stdout == "Wrote page.html\n"
    missing = command("a", "nowhere", folder=tmp_path)
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: There is no nowhere. Name the folder of a run")
    (tmp_path / "b" / "run.json").write_text("{}")
    broken = command("a", "b", folder=tmp_path)
    assert broken.returncode == 1
    assert "no record of a run that can be read" in broken.stderr
