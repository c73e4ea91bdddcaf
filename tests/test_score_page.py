"""The page people look at after scoring: what is in the document, and how it behaves in a real browser."""

import base64
import csv
import hashlib
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Opener
from PIL import Image

from onefold.data import digits, letters
from onefold.errors import InputError, visible
from onefold.report.score_page import ScorePage, render

NASTY = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"quoted\" 'name' & more",
    "photo\u202egpj.exe",
    "lines\u2028and\u2029ends\n",
    "=HYPERLINK(1)",
    "größe 数字 🦉.png",
    "half \udc80 a letter",
    "{{ 7 * 7 }}",
    "constructor",
]


def plain(count: int = 40, **changes: Any) -> ScorePage:
    """Names and scores only: scores 1, 2, …, with even familiar ones among the lower half."""
    parts: dict[str, Any] = {
        "title": "some.csv", "method": "CSD", "familiar": np.arange(0.5, 20, 1.0),
        "scores": np.arange(1.0, count + 1), "names": [f"item-{i}" for i in range(count)],
        "threshold": 18.0, "fpr": 0.1, "about": {"onefold": "0"},
    }  # fmt: skip
    return ScorePage(**(parts | changes))


def nasty() -> ScorePage:
    """Untrusted text in every place of the page."""
    n = len(NASTY)
    return ScorePage(
        title=NASTY[0], method=NASTY[0], familiar=np.arange(5.0), scores=np.arange(float(n)), names=NASTY,
        threshold=2.5, fpr=0.4, columns=NASTY[:3], values=[[name] * 3 for name in NASTY], standout=np.ones((n, 3)),
        notes=NASTY, about={name: name for name in NASTY},
    )  # fmt: skip


@pytest.fixture(scope="module")
def scans() -> ScorePage:
    """Digits as familiar, digits and letters as new; the score is a cubed distance to the nearest three."""
    data = digits()
    new = np.concatenate([data.x_test[:60], letters(60)])

    def distances(x: np.ndarray) -> np.ndarray:
        return np.linalg.norm(x.reshape(-1, 1, 64) - data.x_train.reshape(1, -1, 64), axis=2)

    to_new, to_familiar = distances(new), distances(data.x_test[100:300])
    scores, familiar = ((np.sort(d)[:, :3].mean(1) ** 3) for d in (to_new, to_familiar))
    return ScorePage(
        title="120 scans",
        method="CSD",
        familiar=familiar,
        scores=scores,
        names=[f"digit-{i}.png" for i in range(60)] + [f"letter-{i}.png" for i in range(60)],
        pvalues=(1 + (familiar >= scores[:, None]).sum(1)) / (1 + len(familiar)),
        threshold=float(np.sort(familiar)[190]),
        fpr=0.05,
        pictures=(255 * new).astype(np.uint8),
        familiar_pictures=(255 * data.x_train).astype(np.uint8),
        nearest=np.argsort(to_new)[:, :4],
        notes=["3 of 123 images could not be read"],
        about={"onefold": "0.0.0", "data": "digits and letters"},
    )


class Document(HTMLParser):
    """Tags, addresses, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.blocks: list[tuple[dict[str, str | None], str]] = []
        self.policy, self.open = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self.open = tag in ("script", "style")
        if self.open:
            self.blocks.append((values, ""))
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.open:
            attributes, before = self.blocks[-1]
            self.blocks[-1] = (attributes, before + data)

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in ("script", "style")


def content(text: str) -> dict[str, Any]:
    """The JSON inside the page, read by a parser that knows no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    block = next(body for attributes, body in Document(text).blocks if attributes.get("id") == "data")
    return json.loads(block, parse_constant=refuse)


def test_untrusted_text_is_inert() -> None:
    text = render(nasty())
    document = Document(text)
    assert "img" not in document.tags
    assert document.tags.count("script") == 2
    assert "{{ 7 * 7 }}" in text
    block = next(body for attributes, body in document.blocks if attributes.get("id") == "data")
    assert not re.search(r"[<>&\u2028\u2029]|[^\x00-\x7f]", block)
    data = content(text)
    assert data["names"] == [visible(name) for name in NASTY]
    assert {NASTY[int(i)]: name for i, name in data["originals"].items()} == {
        name: name for name in NASTY if visible(name) != name
    }
    assert "\u202e" not in text
    text.encode("utf-8")


def test_hidden_characters_are_written_out_and_others_kept() -> None:
    assert visible("a\u202eb\x00\udcff") == "a\\u202eb\\u0000\\udcff"
    assert visible("größe 数字 🦉 שלום") == "größe 数字 🦉 שלום"


def test_only_its_own_script_and_style_may_run(scans: ScorePage) -> None:
    document = Document(render(scans))
    rules = {part.split()[0]: part.split()[1:] for part in document.policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    assert rules["img-src"] == ["data:"]
    bodies = [body for attributes, body in document.blocks if attributes.get("id") != "data"]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies]
    assert hashes == rules["style-src"] + rules["script-src"]


def test_nothing_outside_is_asked_for(scans: ScorePage) -> None:
    for page in (scans, plain()):
        text = render(page)
        assert not re.search(r"https?:|//\w+\.\w+|url\((?!#)", text)
        assert all(address.startswith("data:") for address in Document(text).addresses)


def test_numbers_that_are_none_stay_json() -> None:
    scores = np.array([1.0, np.nan, np.inf, -np.inf, 5e-324])
    page = plain(5, scores=scores, pvalues=scores, threshold=np.inf, fpr=np.nan, familiar=np.array([np.nan, np.inf]),
                 columns=["a"], values=[["x"]] * 5, standout=scores[:, None])  # fmt: skip
    data = content(render(page))
    assert data["scores"] == data["pvalues"] == [1.0, None, "Infinity", "-Infinity", 5e-324]
    assert data["standout"][1:4] == [[None], ["Infinity"], ["-Infinity"]]
    assert (data["threshold"], data["fpr"], data["familiar"]) == ("Infinity", None, [None, "Infinity"])
    assert all(np.isfinite(data["axis"][end]) for end in ("lo", "hi"))


@pytest.mark.parametrize(
    ("scores", "log"),
    [([1.0, 2.0, 3.0], False), ([0.001, 0.1, 10.0], True), ([0.0, 0.001, 10.0], True), ([-1.0, 1e6, 2.0], False),
     ([7.0, 7.0, 7.0], False), ([0.0, 0.0, 0.0], False)],
)  # fmt: skip
def test_the_axis_holds_every_score(scores: list[float], log: bool) -> None:
    axis = content(render(plain(3, scores=np.array(scores), familiar=np.zeros(0), threshold=None)))["axis"]
    assert axis["log"] == log
    ends = [10 ** axis[end] if log else axis[end] for end in ("lo", "hi")]
    assert ends[0] < min(s for s in scores if s > 0 or not log)
    assert ends[1] > max(scores)


def cells(atlas: dict[str, Any]) -> np.ndarray:
    """Every cell of the sheets, cut out as the page's script cuts them out."""
    sheets = [np.asarray(Image.open(io.BytesIO(base64.b64decode(s.split(",")[1])))) for s in atlas["sheets"]]
    across, high, wide = atlas["across"], atlas["cellHeight"], atlas["cellWidth"]
    found = []
    for sheet in sheets:
        for place in range(atlas["perSheet"]):
            x, y = place % across * wide, place // across * high
            part = sheet[y : y + atlas["height"], x : x + atlas["width"]]
            if part.size:
                found.append(part)
    return np.stack(found)


@pytest.mark.parametrize("shape", [(5, 8, 8), (6000, 28, 27), (70, 12, 20, 3), (1, 300, 5)])
def test_thumbnails_come_out_of_their_sheets_as_they_went_in(shape: tuple[int, ...]) -> None:
    pictures = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    atlas = content(render(plain(shape[0], pictures=pictures)))["pictures"]
    assert np.array_equal(cells(atlas)[: shape[0]], pictures)
    assert (len(atlas["sheets"]) > 1) == (shape[0] == 6000)


def test_ten_thousand_images_stay_light() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (10_000, 32, 32), dtype=np.uint8)  # nothing compresses worse
    text = render(plain(10_000, pictures=noise))
    assert len(text.encode()) < 15_000_000
    atlas = content(text)["pictures"]
    assert len(atlas["sheets"]) == 3
    assert all(sheet.startswith("data:image/jpeg") for sheet in atlas["sheets"])


def test_pictures_too_large_in_all_are_shrunk() -> None:
    pictures = np.repeat(np.arange(40, dtype=np.uint8), 1024 * 1024).reshape(40, 1024, 1024)
    atlas = content(render(plain(40, pictures=pictures)))["pictures"]
    assert (atlas["width"], atlas["height"]) == (512, 512)
    assert np.array_equal(cells(atlas)[:40, 0, 0], np.arange(40))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["one"]}, "2 scores but 1 names"),
        ({"columns": ["a"], "values": [["1"]]}, "2 scores but 1 rows"),
        ({"columns": ["a"]}, "columns without values"),
        ({"columns": ["a"], "values": [["1"], ["1", "2"]]}, "1 columns, but a row"),
        ({"columns": ["a"], "values": [["1"], ["2"]], "standout": np.ones((2, 3))}, "standout for 3"),
        ({"nearest": np.array([[0], [5]])}, "outside the 0 familiar pictures"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(plain(2, **changes))


def test_wide_tables_show_the_columns_that_stand_out() -> None:
    standout = np.zeros((2, 40))
    standout[:, [3, 37]] = 1
    wide = {"columns": [f"c{i}" for i in range(40)], "values": [["0"] * 40] * 2}
    assert {3, 37} <= set(content(render(plain(2, standout=standout, **wide)))["shown"])
    assert content(render(plain(2, **wide)))["shown"] == list(range(24))


@pytest.fixture
def visit(opened: Opener, tmp_path: Path) -> Opener:
    """Writes a page and opens it."""
    numbers = itertools.count()

    def visit(page: ScorePage, width: int = 1200, height: int = 900, scheme: str = "light") -> Any:
        path = tmp_path / f"{next(numbers)}.html"
        path.write_text(render(page), encoding="utf-8")
        return opened(path, width, height, scheme)

    return visit


def figures(tab: Any) -> tuple[int, int]:
    """Flagged inputs and false alarms, as the page says them."""
    alarms = tab.locator("#false-count").inner_text().split(" of ")[0]
    return int(tab.locator("#flagged-count").inner_text().replace(",", "")), int(alarms.replace(",", ""))


def expected(page: ScorePage, threshold: float) -> tuple[int, int]:
    scores, familiar = (part.astype(np.float64) for part in (page.scores, page.familiar))
    return int((scores > threshold).sum()), int((familiar > threshold).sum())


def slide(tab: Any, step: int) -> None:
    move = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }"
    tab.locator("#threshold").evaluate(move, step)


def names(tab: Any) -> list[str]:
    """Names of the drawn tiles or rows, in the order in which they lie on the page."""
    script = """() => [...document.querySelectorAll('[data-item]')].map((e) => {
        const box = e.getBoundingClientRect();
        return [Math.round(box.top), Math.round(box.left), (e.querySelector('b, .title')).title];
    }).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((e) => e[2])"""
    return tab.evaluate(script)


def test_the_slider_moves_the_counts(visit: Opener, scans: ScorePage) -> None:
    for page in (scans, plain(scores=np.arange(-20.0, 20))):
        tab, axis, start = visit(page), content(render(page))["axis"], page.threshold
        assert axis["log"] == (page is scans)
        assert start is not None
        assert figures(tab) == expected(page, start)
        assert "calibrated for" in tab.locator("#threshold-note").inner_text()
        for step in (0, 137, 500, 861, 1000):
            slide(tab, step)
            place = axis["lo"] + step / 1000 * (axis["hi"] - axis["lo"])
            threshold = 10**place if axis["log"] else place
            assert figures(tab) == expected(page, threshold)
            flagged, alarms = expected(page, threshold)
            spoken = tab.locator("#threshold").get_attribute("aria-valuetext")
            assert f"{flagged} of {len(page.scores)} flagged" in spoken
            assert f"{100 * alarms / len(page.familiar):.1f}\u00a0% false alarms" in spoken
            line, plot = tab.locator("line.threshold").get_attribute("x1"), tab.locator("#histogram").bounding_box()
            assert float(line) == pytest.approx(11 + step / 1000 * (plot["width"] - 22), abs=0.06)
        tab.locator("#reset").click()
        assert figures(tab) == expected(page, start)


def test_the_histogram_can_be_dragged(visit: Opener) -> None:
    tab = visit(plain())
    box = tab.locator("#histogram").bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 11, box["y"] + 60)
    tab.mouse.up()
    assert figures(tab) == (40, 20)
    tab.mouse.move(box["x"] + 300, box["y"] + 60)  # without the button
    assert figures(tab) == (40, 20)


def test_everything_works_by_keyboard(visit: Opener, scans: ScorePage) -> None:
    tab, order = visit(scans), np.argsort(-scans.scores, kind="stable")
    tab.locator("#threshold").focus()
    tab.keyboard.press("End")
    assert figures(tab) == (0, 0)
    tab.keyboard.press("Home")
    assert figures(tab) == (120, 200)
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    assert scans.threshold is not None
    assert figures(tab) == expected(scans, scans.threshold)
    for _ in range(5):
        tab.keyboard.press("Tab")
    focused = "document.activeElement.dataset.item"
    assert tab.evaluate(focused) == str(order[0])
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(focused) == str(order[1])
    tab.keyboard.press("End")
    assert tab.evaluate(focused) == str(order[-1])
    box = tab.locator(":focus").bounding_box()
    assert 0 <= box["y"] <= box["y"] + box["height"] <= 900
    tab.keyboard.press("Enter")
    assert tab.locator("#detail-name").inner_text() == scans.names[order[-1]]
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#detail-name").inner_text() == scans.names[order[-2]]
    tab.locator("#next").press("Enter")  # the last one: the button that was pressed is switched off
    tab.keyboard.press("ArrowLeft")
    assert tab.locator("#detail-name").inner_text() == scans.names[order[-2]]
    tab.keyboard.press("Escape")
    assert not tab.locator("#detail").is_visible()
    tab.locator(f"[data-item='{order[-2]}']:focus").wait_for()  # a dialog says that it was closed a moment later


def test_the_gallery_sorts_filters_and_searches(visit: Opener, scans: ScorePage) -> None:
    tab, by_score = visit(scans, height=5000), [scans.names[i] for i in np.argsort(-scans.scores, kind="stable")]
    assert names(tab) == by_score
    tab.locator("#order").select_option("familiar")
    assert names(tab) == by_score[::-1]
    tab.locator("#order").select_option("name")
    assert names(tab) == list(scans.names)  # digit-2 before digit-10
    tab.locator("#flagged-only").check()
    flagged = [name for name, score in zip(scans.names, scans.scores, strict=True) if score > (scans.threshold or 0)]
    assert names(tab) == flagged
    assert tab.locator(".tile .pill:visible").count() == len(flagged)
    tab.locator("#search").fill("LETTER-1")
    assert names(tab) == [name for name in flagged if name.startswith("letter-1")]
    assert tab.locator("#shown-count").inner_text() == f"{len(names(tab))} of 120"
    tab.locator("#search").fill("nobody")
    assert names(tab) == []
    assert tab.locator("#nothing").is_visible()
    tab.locator("#search").fill("")
    slide(tab, 1000)
    assert names(tab) == []
    tab.locator("#reset").click()
    assert names(tab) == flagged
    tab.locator("#flagged-only").uncheck()
    assert tab.locator(".tile .pill:visible").count() == len(flagged)


def pixels(tab: Any, selector: str) -> np.ndarray:
    script = """(c) => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"""
    return np.array(tab.locator(selector).first.evaluate(script)).reshape(8, 8, 4)[:, :, 0]


def test_an_opened_image_stands_beside_its_nearest(visit: Opener, scans: ScorePage) -> None:
    tab, strangest = visit(scans), int(np.argmax(scans.scores))
    tab.locator(f"[data-item='{strangest}']").click()
    tab.wait_for_timeout(200)  # sheets are decoded in the background
    assert scans.pictures is not None
    assert scans.familiar_pictures is not None
    assert scans.nearest is not None
    assert np.array_equal(pixels(tab, ".large canvas"), scans.pictures[strangest])
    nearest = scans.familiar_pictures[scans.nearest[strangest]]
    for i, picture in enumerate(nearest):
        assert np.array_equal(pixels(tab, f".neighbours li:nth-child({i + 1}) canvas"), picture)
    assert "1 of 120, least familiar first" in tab.locator(".facts").inner_text()
    tab.locator("#next").click()
    assert "2 of 120, least familiar first" in tab.locator(".facts").inner_text()
    moving = "getComputedStyle(document.getElementById('detail')).animationName"
    assert tab.evaluate(moving) == "rise"
    tab.emulate_media(reduced_motion="reduce")
    assert tab.evaluate(moving) == "none"


def test_flagged_names_are_exported(visit: Opener) -> None:
    tab = visit(nasty())
    with tab.expect_download() as download:
        tab.locator("#export").click()
    text = download.value.path().read_bytes().decode("utf-8")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["name", "score", "pvalue", "rank"]
    shown = {"=HYPERLINK(1)": "'=HYPERLINK(1)", "half \udc80 a letter": "half \ufffd a letter"}
    wanted = [[shown.get(name, name), str(i), "", str(10 - i)] for i, name in enumerate(NASTY) if i > 2.5]
    assert rows[1:] == wanted[::-1]


def test_nasty_names_do_nothing_but_show(visit: Opener) -> None:
    tab = visit(nasty(), height=2600)
    assert set(names(tab)) == {visible(name) for name in NASTY}
    tab.locator("[data-item='0']").click()
    assert tab.locator("#detail-name").inner_text() == NASTY[0]
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == 2


def test_a_table_marks_what_stands_out_in_flagged_rows(visit: Opener) -> None:
    rng = np.random.default_rng(0)
    standout, columns = rng.random((30, 6)), [f"column {c}" for c in range(6)]
    values = [[f"{i}.{c}" for c in range(6)] for i in range(30)]
    page = plain(30, scores=rng.random(30), threshold=0.5, columns=columns, values=values, standout=standout)
    tab = visit(page, height=3000)
    script = "(e) => [...e.querySelectorAll('.stands-out')].map((c) => c.textContent)"
    for i in range(30):
        most = sorted(np.argsort(-standout[i])[:3]) if page.scores[i] > 0.5 else []
        row = tab.locator(f"[data-item='{i}']")
        if row.count():
            assert row.evaluate(script) == [values[i][c] for c in most]
    first = int(np.argmax(page.scores))
    assert tab.locator(".rows .row").count() >= 15
    tab.locator(f"[data-item='{first}']").press("Enter")
    assert tab.locator(".fields th").all_inner_texts() == [columns[c] for c in np.argsort(-standout[first])]
    head, cell = (tab.locator(f"{row} > span:last-child").first.bounding_box() for row in (".row.head", ".rows .row"))
    assert (head["x"], head["width"]) == pytest.approx((cell["x"], cell["width"]), abs=10)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"familiar": np.zeros(0), "threshold": None, "fpr": None},
        {"scores": np.full(40, np.nan)},
        {"scores": np.append(np.full(39, 3.0), np.inf), "threshold": np.inf},
        {"scores": np.zeros(0), "names": []},
        {"scores": 10.0 ** np.arange(-20, 20)},
    ],
)
def test_odd_data_still_make_a_page(visit: Opener, changes: dict[str, Any]) -> None:
    page = plain(**changes)
    tab = visit(page)
    flagged = int((page.scores > (np.inf if page.threshold is None else page.threshold)).sum())
    assert tab.locator("#flagged-count").inner_text() == str(flagged)
    assert tab.locator("#reset").is_visible() == (page.threshold is not None)
    assert "NaN" not in tab.locator("body").inner_html().split('id="data"')[0]


CONTRAST = """() => {
  const linear = (v) => v <= 0.03928 * 255 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const under = (e) => {
    const colour = e ? parse(getComputedStyle(e).backgroundColor) : [255, 255, 255];
    return colour.length < 4 || colour[3] === 1 ? colour : under(e.parentElement);
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
    if (e.closest('script, style, [aria-hidden] span') || e.matches(':disabled')) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(parse(e.closest('svg') ? style.fill : style.color)), light(under(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${e.tagName} ${e.className} ${(a + 0.05) / (b + 0.05)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(visit: Opener, scans: ScorePage, scheme: str) -> None:
    table = plain(40, columns=["a", "b"], values=[["1", "2"]] * 40, standout=np.eye(2)[np.arange(40) % 2] + 0.1)
    for page in (scans, table):
        tab = visit(page, scheme=scheme)
        assert tab.evaluate(CONTRAST) == []
        tab.locator("[data-item]").first.click()
        tab.evaluate("Promise.all(document.getAnimations().map((rise) => rise.finished)).then(() => null)")
        assert tab.evaluate(CONTRAST) == []
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", background))) < 60) == (scheme == "dark")


def test_a_phone_needs_no_sideways_scroll(visit: Opener, scans: ScorePage) -> None:
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    columns = [f"a rather long column name {c}" for c in range(30)]
    table = plain(40, columns=columns, values=[["a value"] * 30] * 40, title="x" * 300, notes=["y" * 300])
    for page in (scans, table, nasty()):
        tab = visit(page, width=360, height=740)
        assert not tab.evaluate(wide)
        tab.locator("[data-item]").first.click()
        assert not tab.evaluate(wide)
        assert tab.evaluate(
            "document.getElementById('detail').scrollWidth <= document.getElementById('detail').clientWidth"
        )


def shade(tab: Any, item: int) -> int:
    """The grey in the middle of a tile, once its sheet is decoded."""
    script = "(c) => [...c.getContext('2d').getImageData(9, 9, 1, 1).data]"
    for _ in range(100):
        grey, *_, drawn = tab.locator(f"[data-item='{item}'] canvas").evaluate(script)
        if drawn:
            return grey
        tab.wait_for_timeout(50)
    raise AssertionError(f"tile {item} stays empty")


def test_ten_thousand_images_keep_the_document_small(visit: Opener) -> None:
    shades = np.arange(10_000)
    pictures = np.broadcast_to((shades % 251).astype(np.uint8)[:, None, None], (10_000, 32, 32)).copy()
    tab = visit(plain(10_000, scores=10_000.0 - shades, pictures=pictures))
    most, height = 0, tab.evaluate("document.documentElement.scrollHeight")
    for share in (0, 0.1, 0.33, 0.5, 0.77, 1):
        tab.evaluate(f"scrollTo(0, {share * height})")
        tab.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(null))))")
        most = max(most, tab.evaluate("document.querySelectorAll('*').length"))
        seen = "document.elementFromPoint(innerWidth / 2, innerHeight - 300).closest('[data-item]')?.dataset.item"
        if share in (0.33, 0.5, 0.77):
            item = int(tab.evaluate(seen))
            assert item == pytest.approx(share * 10_000, abs=150)
            assert shade(tab, item) == item % 251
    assert most < 3_000
    tab.locator("#search").fill("item-9999")
    assert names(tab) == ["item-9999"]
