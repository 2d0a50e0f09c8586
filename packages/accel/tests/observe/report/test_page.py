"""The page of a report: complete, self-contained, safe against what names hold, and right in a browser."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from accel.observe.report.page import IMAGE_BYTES, ROWS, render
from accel.observe.report.read import read_runs
from accel.observe.statistics.clock import SECTIONS
from accel_launch.cli import main

VOID = {"meta", "img"}
EVIL = "<script>alert('x')</script>\"&"


class Reader(HTMLParser):
    """Checks that what is opened is closed, and keeps text and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.words, self.attributes = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def line(**entry):
    return json.dumps({"time": 1.0, **entry}) + "\n"


def write_run(folder, name="digits", steps=30):
    folder.mkdir(exist_ok=True, parents=True)
    lines = [line(run=name, config={"lr": 0.1, "model": {"sizes": [16, 32], "name": EVIL}})]
    for step in range(steps):
        loss = "NaN" if step in (7, 8) else 1 / (step + 1)
        lines.append(line(step=step, values={"loss": loss, "inner": {"lr": 0.1}, "state": f"at {EVIL}"}))
    lines.append(line(step=3, values={EVIL: 2.5}))
    lines.append(line(step=9, table="answers", columns=["digit", EVIL], data=[[7, EVIL]] * (ROWS + 5)))
    lines.append(
        line(step=9, images={"sample": [f"{name}_images/sample.png", "../secret.png", "/etc/a.png"]})
    )
    (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / f"{name}_images").mkdir(exist_ok=True)
    (folder / f"{name}_images" / "sample.png").write_bytes(b"\x89PNG" + b"\0" * 40)
    (folder.parent / "secret.png").write_bytes(b"secret")


def write_summary(folder, processes=2):
    own = {"host": EVIL, "device": "cpu", "steps": 30, "samples": 120}
    own |= {"peak_memory": {"host": 300 * 2**20, "device": 0}}
    seconds = dict.fromkeys(SECTIONS, 0.5)
    ranks = [{"rank": rank, **own, "seconds": {**seconds, "data": 1.25 + rank}} for rank in range(processes)]
    slow = [{"rank": 1, "part": "data", "ratio": 1.84, "steps": [1, 20]}]
    summary = {"version": 1, "processes": processes, "steps": 30, "samples": 2400, "seconds": 5.25}
    summary |= {"samples_per_second": 457.14, "ranks": ranks, "missing": [], "slow": slow}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def page(tmp_path):
    write_run(tmp_path / "runs")
    write_summary(tmp_path / "runs")
    return render(read_runs(tmp_path / "runs"))


def test_the_page_needs_nothing_else(page):
    reader = Reader(page)
    assert not {"script", "link", "iframe", "object"} & set(reader.tags)
    assert "://" not in re.sub('data:image/png;base64,[^"]*', "", page)
    sources = [value for name, value in reader.attributes if name in ("src", "href")]
    assert len(sources) == 1  # the files outside of the folder are not there
    assert sources[0].startswith("data:image/png;base64,")
    assert not [name for name, _ in reader.attributes if name.startswith("on")]


def test_the_values_are_there(page):
    said = " ".join(Reader(page).words)
    for wanted in (
        "digits",
        "loss",
        "inner/lr",
        "last 0.03333, lowest 0.03333, highest 1, 2 not finite",
        "nan at step 7",
        f"at {EVIL}",
        "model/sizes [16, 32]",
        f"model/name {EVIL}",
        "Table answers, step 9",
        f"The first {ROWS} of {ROWS + 5} rows.",
        "sample, step 9",
        "457.1",
        "2,400",
        "Process 1 is slow: data, up to 1.8 times the median (steps 1 to 20).",
        "300 MiB",
    ):
        assert " ".join(wanted.split()) in " ".join(said.split()), wanted
    assert "process 0" in said
    assert page.count("<svg") == 3


def test_curves_have_gaps_and_bars_are_to_scale(page):
    loss = re.search(r"<h3>loss</h3>(<svg.*?</svg>)", page)[1]
    lines = re.findall(r'<polyline class="c0" points="([^"]*)"/>', loss)
    assert [len(points.split()) for points in lines] == [7, 21]
    assert loss.count('class="gap"') == 2
    bars = re.findall(r'<div class="bar">(.*?)</div>', page)
    widths = [[float(width) for width in re.findall(r"width:([\d.]+)%", bar)] for bar in bars]
    assert [sum(row) for row in widths] == [
        pytest.approx(100 * 4.25 / 5.25, abs=0.1),
        pytest.approx(100, abs=0.1),
    ]
    assert widths[1][0] == pytest.approx(100 * 2.25 / 5.25, abs=0.01)


def test_a_run_that_continues_is_drawn_so_far(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        line(step=0, values={"loss": 1.0}) + "{broken}\n[1]\n" + '{"step": 1, "val'
    )
    slow = [{"rank": 3, "part": "forward", "ratio": 2.04}]
    text = line(step=100, values={"statistics/step_ms": 5.0}, slow=slow)
    (tmp_path / "statistics.jsonl").write_text(text)
    (run,) = read_runs(tmp_path / "a.jsonl")
    assert run.curves == {"loss": [(0.0, 1.0)], "statistics/step_ms": [(100.0, 5.0)]}
    assert run.unread == 2
    said = " ".join(Reader(render([run])).words)
    assert "Process 3 was slow at step 100: forward, 2.0 times the median." in said
    assert "2 lines could not be read" in said


def test_runs_of_a_folder_are_drawn_together(tmp_path):
    for name in ("first", "second"):
        write_run(tmp_path / name)
    write_run(tmp_path, "third", steps=2)
    runs = read_runs(tmp_path)
    assert [run.name for run in runs] == ["third", "first/digits", "second/digits"]
    page = render(runs)
    loss = re.search(r"<h3>loss</h3>(<svg.*?</svg>)", page)[1]
    assert [f'class="c{index}"' in loss for index in range(4)] == [True, True, True, False]
    assert "Configuration of first/digits" in " ".join(Reader(page).words)


def test_statistics_alone_are_a_run(tmp_path):
    write_summary(tmp_path)
    (run,) = read_runs(tmp_path)
    assert run.name == tmp_path.name
    assert "457.1" in " ".join(Reader(render([run])).words)


def test_of_many_processes_those_that_waited_least_are_shown(tmp_path):
    write_summary(tmp_path, processes=40)
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["ranks"][37]["seconds"]["collectives"] = 0.01
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    said = " ".join(Reader(render(read_runs(tmp_path))).words)
    assert "process 37" in said
    assert "8 processes that waited longer are left out." in said


def test_large_images_are_left_out(tmp_path):
    write_run(tmp_path / "runs")
    (tmp_path / "runs/digits_images/sample.png").write_bytes(b"0" * (IMAGE_BYTES + 1))
    reader = Reader(render(read_runs(tmp_path / "runs")))
    assert "img" not in reader.tags
    assert "1 missing, or too large to be shown here." in reader.words


def test_the_command_writes_the_page_without_torch(tmp_path):
    write_run(tmp_path)
    code = (
        "import sys; from accel_launch.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'report.html'}\n", "")
    assert Reader((tmp_path / "report.html").read_text()).words[1] == "digits"
    assert main(["report", str(tmp_path / "digits.jsonl"), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").stat().st_size > 5000


@pytest.mark.parametrize(("name", "said"), [("none", "neither a folder nor a file"), (".", "has no run")])
def test_what_is_no_run_is_an_error(tmp_path, capsys, name, said):
    assert main(["report", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    write_run(tmp_path)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "none/page.html")]) == 2
    assert "none/page.html cannot be written: No such file or directory." in capsys.readouterr().err


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --hide-scrollbars --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--allow-file-access-from-files --virtual-time-budget=2000"
)
# A phone's width is below the least one of a window, so that the page stands in a frame.
MEASURE = """<!doctype html><body><script>
const widths = [390, 1200], found = [];
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:800px;border:0`;
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const outside = [...page.querySelectorAll("main *")].filter(
      (item) => !item.closest(".wide,svg") && item.getBoundingClientRect().right > width + 0.5);
    const lines = [...page.querySelectorAll("polyline")];
    const drawn = lines.filter((item) => item.getBoundingClientRect().width > 50);
    const light = getComputedStyle(page.body).backgroundColor;
    found.push({width, scroll: root.scrollWidth, outside: outside.map((item) => item.outerHTML.slice(0, 80)),
      curves: drawn.length, stroke: getComputedStyle(drawn[0]).stroke, background: light});
    if (found.length == widths.length) document.body.textContent = JSON.stringify(found);
  };
  frame.src = "report.html";
  document.body.append(frame);
}
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it_on_a_phone_and_on_a_wide_screen(page, tmp_path):
    long_name = page.replace("<h3>loss</h3>", f"<h3>{'loss_of_the_layer/' * 8}</h3>")
    (tmp_path / "report.html").write_text(long_name)
    (tmp_path / "measure.html").write_text(MEASURE)
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS.split(),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "measure.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(re.search(r"<body>(\[.*\])", done.stdout)[1].replace("&lt;", "<").replace("&gt;", ">"))
    assert sorted(item["width"] for item in found) == [390, 1200]
    for item in found:
        assert item["scroll"] == item["width"]
        assert item["outside"] == []
        assert item["curves"] == 3  # of the loss in two pieces, and one of inner/lr
        assert item["stroke"] == "rgb(47, 107, 208)"
        assert item["background"] == "rgb(246, 247, 249)"


def test_numbers_that_json_does_not_have_are_read(tmp_path):
    texts = ["Infinity", "-Infinity", "NaN", "other"]
    (tmp_path / "a.jsonl").write_text(
        "".join(line(step=step, values={"x": text}) for step, text in enumerate(texts))
    )
    (run,) = read_runs(tmp_path)
    assert [point[1] for point in run.curves["x"][:2]] == [math.inf, -math.inf]
    assert math.isnan(run.curves["x"][2][1])
    assert run.texts == {"x": "other"}
    assert render([run]).count('class="gap"') == 3


def test_strange_lines_leave_the_rest_of_the_page(tmp_path):
    lines = [
        line(step=1, values={"x": 1.7e308}),
        line(step=2, values={"x": -1.7e308}),
        line(step=3, values={"x": 10**400}),
        line(step=4, values={"x": 1.0}),
        line(step=math.nan, values={"x": 1.0}),
        line(step=10**400, values={"x": 1.0}),
        line(step=5, slow=[{"rank": 1}]),
        line(step=5, slow=[{"rank": "<b>", "part": "data", "ratio": 2.0}]),
        line(table="empty", columns=None, data=None),
        line(table="ragged", columns=None, data=[[1, 2], [3]]),
        "[" * 100_000 + "\n",
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "summary.json").write_text(json.dumps({"version": 1, "ranks": []}))
    (run,) = read_runs(tmp_path)
    assert run.curves["x"] == [(1.0, math.inf), (2.0, -math.inf), (3.0, math.inf), (4.0, 1.0)]
    assert run.unread == 6
    assert run.slow == []
    page = Reader(render([run]))
    assert "Table ragged" in page.words
    assert "Table empty" not in page.words
