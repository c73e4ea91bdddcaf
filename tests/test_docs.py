"""The site: every block of code on it runs, every picture has a script, and in a browser it works by itself."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
from pages import LANGUAGES, check_printed, replaced, run_page, steps

from onefold.detectors.registry import METHODS
from onefold.rl.bonus import BONUSES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _with_code() -> list[Any]:
    """Pages that have code, the long ones marked so."""
    found = []
    for path in PAGES:
        parts = list(steps(path.read_text("utf-8")))
        if any(part.kind in LANGUAGES for part in parts):
            slow = any(part.kind == "test" and part.code == "slow" for part in parts)
            found.append(pytest.param(path, id=_name(path), marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize("path", _with_code())
def test_the_code_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods and bonuses that a page registers are removed afterwards: other tests run over the registries."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(METHODS), mock.patch.dict(BONUSES):
        run_page(path)
    assert "Mahalanobis" not in METHODS


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_no_block_is_of_a_kind_that_is_not_run(path: Path) -> None:
    text = path.read_text("utf-8")
    kinds = {part.kind for part in steps(text)} - {"run", "first", "check", "test"}
    assert kinds <= set(LANGUAGES)
    fences = [line for line in text.splitlines() if line.lstrip().startswith("```")]
    assert len(fences) == 2 * sum(part.kind in LANGUAGES for part in steps(text)), "a fence is left open"


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_pictures_and_links_lead_somewhere(path: Path) -> None:
    """mkdocs checks the site's own; this holds for the README too."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:", "#", "mailto:")):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


def test_pages_are_run_as_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner itself: order, one namespace, one folder, changes, checks, and output but for its figures."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    good = (
        "<!-- first: start = 3 -->\n```python\nx = start\n```\n<!-- check: x == 3 -->\n"
        "<!-- run: 10**9 → 4 -->\n```python\nfrom pathlib import Path\nPath('made').write_text('a' * 10**9)\n"
        "print('wrote', x)\n```\n"
        "```text\nwrote 17\n```\n```sh\ntest $(wc -c < made) = 4 # as said\necho done\n```\n"
    )
    page.write_text(good, "utf-8")
    run_page(page)
    for bad, message in (
        (good.replace("x == 3", "x == 4"), "x == 4 is not true"),
        (good.replace("10**9 →", "10**8 →"), "there is no"),
        (good.replace("wrote 17", "written 17"), "was not printed"),
        (good.replace("= 4 #", "= 5 #"), "line 15"),
        (good + "<!-- run: a → b -->", "no block follows"),
    ):
        page.write_text(bad, "utf-8")
        with pytest.raises(AssertionError, match=message):
            run_page(page)
    assert replaced("a b", ["a → c"], "") == "c b"
    check_printed("took 3.2 s", "took 11 s", "")


# --- the site in a browser --------------------------------------------------------------------------------------------


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site, built with every warning an error, on a plain server of files."""
    pytest.importorskip("mkdocs", reason="no mkdocs on this machine: make docs installs it")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(out)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def tab(browser: Any, site: str) -> Iterator[Any]:
    """Opens the site in a window of some width; nothing may be logged, and nobody else may be asked for anything."""
    said: list[str] = []
    contexts = []

    def opened(width: int, scheme: str = "light") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda asked: asked.url.startswith((site, "data:", "blob:")) or said.append(asked.url))
        page.on("response", lambda answer: answer.status < 400 or said.append(f"{answer.status}: {answer.url}"))
        page.goto(site)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


def _addresses(page: Any) -> list[str]:
    """Every page of the navigation, in order."""
    script = "links => links.map(link => link.href.split('#')[0])"
    return list(dict.fromkeys(page.locator(".md-nav--primary a.md-nav__link[href]").evaluate_all(script)))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_every_page_is_whole(tab: Any, site: str, width: int, scheme: str) -> None:
    page = tab(width, scheme)
    addresses = _addresses(page)
    expected = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES if path.is_relative_to(DOCS)}
    found = {address.removeprefix(site).rstrip("/") for address in addresses}
    experiments = {name for name in expected if re.match(r"experiments/\d", name)}  # listed by their index alone
    assert found == {re.sub(r"(^|/)index$", "", name) for name in expected - experiments}
    formulas = 0
    for address in [*addresses, *(f"{site}{name}/" for name in sorted(experiments))]:
        page.goto(address)
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").count() == 1, address
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{address} is {wide} wide"
        broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)")
        assert broken == [], address
        formulas += page.locator(".arithmatex").count()
        assert page.locator(".arithmatex .katex").count() >= page.locator(".arithmatex").count(), address
        assert page.locator(".katex-error").count() == 0, address
        assert "\\(" not in page.locator("article").inner_text(), f"{address}: a formula was not drawn"
        shown = page.locator("img[src*='#only-']").evaluate_all("all => all.filter(i => i.offsetWidth).map(i => i.src)")
        assert all(source.endswith(f"#only-{scheme}") for source in shown), address
    assert formulas > 20


@pytest.mark.slow
def test_the_footer_leads_through_all_pages(tab: Any) -> None:
    page = tab(1440)
    addresses, walked = _addresses(page), [page.url]
    while (following := page.locator("a.md-footer__link--next")).count():
        following.click()
        page.wait_for_load_state()
        walked.append(page.url)
    assert walked == addresses


@pytest.mark.slow
def test_the_menu_of_a_narrow_screen_opens(tab: Any) -> None:
    page = tab(390)
    page.locator("label.md-header__button[for='__drawer']").click()
    page.locator(".md-nav--primary >> text=The idea").click()
    page.wait_for_url("**/idea/")


@pytest.mark.slow
def test_search_finds(tab: Any) -> None:
    page = tab(1440)
    page.locator("input.md-search__input").click()
    page.keyboard.type("half_life")
    result = page.locator("a.md-search-result__link[href*='guides/stream']").first
    result.wait_for()
    result.click()
    page.wait_for_url("**/guides/stream/**")
    assert page.locator("h1").inner_text().startswith("A stream")
