"""The site's pages keep their word: equations and functions, the reference and the public names, figures and files."""

import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import onefold
from onefold import data, exact, kernels, rl

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MATHS = (DOCS / "maths.md").read_text("utf-8")
EQUATIONS = re.compile(r"\bEq\. (\d+(?:(?:–|, | and )\d+)*)")


def numbers(text: str) -> set[int]:
    """The equations that a text names: "Eq. 6–7, 22 and 25" are four."""
    found: set[int] = set()
    for listed in EQUATIONS.findall(text):
        for part in re.split(r", | and ", listed):
            first, _, last = part.partition("–")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def named(path: str) -> Any:
    """The object of a dotted name: the longest module in it, and what it has inside."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {path}")


def sections() -> list[tuple[int, str]]:
    """(N, paragraph) for every paragraph "Eq. N in the code: …"."""
    return [(int(n), text) for n, text in re.findall(r"^Eq\. (\d+) in the code: (.*?)(?=\n\n)", MATHS, re.M | re.S)]


LINKS = [
    (number, path, page, anchor)
    for number, text in sections()
    for path, page, anchor in re.findall(r"\[`(onefold[\w.]*)`\]\((api/\w+\.md)#([\w.]+)\)", text)
]


def test_ranges_and_lists_of_equations_are_read() -> None:
    assert numbers("Eq. 6–7, 22 and 25; Eq. 4.") == {4, 6, 7, 22, 25}
    assert numbers("Equation 3, Eq 5") == set()


def test_every_cited_equation_is_explained() -> None:
    cited = {n for path in (ROOT / "src" / "onefold").rglob("*.py") for n in numbers(path.read_text("utf-8"))}
    assert {4, 7, 12, 15, 25, 26} <= cited
    shown = {int(n) for n in re.findall(r"\\qquad \((\d+)\)\n\$\$", MATHS)}
    assert cited <= shown, f"docs/maths.md lacks {sorted(cited - shown)}"
    assert cited <= {n for n, _ in sections()}, "an equation that the code names has no line that says where"


@pytest.mark.parametrize(("number", "path", "page", "anchor"), LINKS, ids=lambda value: str(value))
def test_linked_functions_exist_and_name_their_equation(number: int, path: str, page: str, anchor: str) -> None:
    assert anchor == path
    found = named(path)
    assert number in numbers(inspect.getdoc(found) or ""), f"the docstring of {path} does not name Eq. {number}"
    directives = re.findall(r"^::: ([\w.]+)$", (DOCS / page).read_text("utf-8"), re.M)
    assert any(path == name or path.startswith(f"{name}.") for name in directives), f"{page} does not document {path}"


def test_a_line_about_code_has_a_link() -> None:
    assert {number for number, *_ in LINKS} == {number for number, _ in sections()}
    assert len(LINKS) > 25


def directives() -> set[str]:
    return {
        name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
    }


def public(module: ModuleType) -> set[str]:
    return {f"{module.__name__}.{name}" for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}


def test_every_public_name_is_in_the_reference() -> None:
    """A function that shares its name with its module, such as data.digits, is found inside that module."""
    names = public(onefold) | public(kernels) | public(exact) | public(data) | public(rl)
    shown = directives()
    inner = {name for name in names if f"{name}.{name.rsplit('.', 1)[1]}" in shown}
    assert names - {"onefold.__version__"} - shown - inner == set()
    assert "`onefold.__version__`" in (DOCS / "api" / "index.md").read_text("utf-8")
    assert {"onefold.metrics", "onefold.sklearn.OnefoldDetector"} <= directives()


def test_the_reference_is_of_things_that_exist() -> None:
    optional = {name for name in directives() if name.startswith("onefold.rl.sb3")}
    for name in directives() - (optional if importlib.util.find_spec("stable_baselines3") is None else set()):
        assert inspect.getdoc(named(name)), f"{name} has no docstring"


def test_every_page_of_the_reference_is_listed() -> None:
    index = (DOCS / "api" / "index.md").read_text("utf-8")
    assert {path.name for path in (DOCS / "api").glob("*.md")} - {"index.md"} == set(
        re.findall(r"\]\((\w+\.md)\)", index)
    )


def test_every_experiment_is_listed_with_its_title() -> None:
    folder = DOCS / "experiments"
    rows = re.findall(r"^\| (\d{3}) \| \[(.+)\]\(([\w.-]+\.md)\) \|", (folder / "index.md").read_text("utf-8"), re.M)
    pages = sorted(folder.glob("[0-9]*.md"))
    titles = [path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in pages]
    assert rows == [(path.name[:3], title, path.name) for path, title in zip(pages, titles, strict=True)]
    assert [int(number) for number, *_ in rows] == list(range(1, len(pages) + 1))


def test_every_experiment_has_the_five_parts() -> None:
    expected = ["Question", "Setup", "Commit", "Result", "Decision"]
    for path in sorted((DOCS / "experiments").glob("[0-9]*.md")):
        parts = re.findall(r"^\*\*(\w+)\.\*\*\s+\S", path.read_text("utf-8"), re.M)
        assert parts == expected, path.name


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_result_files(tables: ModuleType) -> None:
    assert {f"docs/results/{path.name}" for path in (DOCS / "results").iterdir()} <= set(tables.PAGES)
    for name, writers in tables.PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        assert text == tables.filled(text, name, writers), f"{name} is not up to date: python benchmarks/tables.py"


def test_the_architecture_lists_packages_in_the_order_of_their_imports() -> None:
    table = (DOCS / "architecture.md").read_text("utf-8").partition("## From data")[0]
    packages = [name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    source = ROOT / "src" / "onefold"
    paths = [path for path in source.rglob("*.py") if path.parent != source or path.stem != "__init__"]
    owners = {path: path.relative_to(source).parts[0].removesuffix(".py") for path in paths}
    assert set(owners.values()) == set(packages)
    for path, owner in owners.items():
        imported = re.findall(r"^\s*(?:from|import) onefold\.(\w+)", path.read_text("utf-8"), re.M)
        below = [name for name in imported if packages.index(name) > packages.index(owner)]
        assert not below, f"{path.relative_to(source)} imports {below}"


def test_the_module_map_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("module_map", ROOT / "tools" / "module_map.py")
    assert spec is not None
    assert spec.loader is not None
    module_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_map)
    text = (DOCS / "architecture.md").read_text("utf-8")
    assert module_map.filled(text) == text, "python tools/module_map.py"


def test_a_changed_figure_would_be_noticed(tables: ModuleType) -> None:
    name = "docs/results/detection.md"
    text = (ROOT / name).read_text("utf-8")
    changed = re.sub(r"(\| RND \| )\d+\.\d+", r"\g<1>12.34", text, count=1)
    assert changed != text
    assert tables.filled(changed, name, tables.PAGES[name]) == text


def test_the_words_about_the_benchmark_hold(tables: ModuleType) -> None:
    """What docs/results/detection.md says under "Findings", and docs/limits.md of kNN and LastLayerGP."""
    table = tables.shift()[1]
    rows = {section.name: {(row.name, row.by_paper_score): row for row in section.rows} for section in table}

    def auroc(name: str, method: str, figure: str = "auroc", by_paper_score: bool = False) -> float:
        return rows[name][method, by_paper_score].estimate(figure).mean

    for name in ("fashion_mnist", "mnist"):
        for method in ("csd", "csd_aug", "csd_ood"):
            for by_paper_score in (False, True):
                paper = rows[name][method, by_paper_score].paper["auroc"].mean
                assert auroc(name, method, by_paper_score=by_paper_score) > paper, (name, method, by_paper_score)
    for name in ("kmnist_10k", "notmnist_22k"):
        assert auroc(name, "csd") < min(auroc(name, "ens3"), auroc(name, "knn"))
        assert auroc(name, "csd") + 5 < auroc(name, "csd_aug")
    assert abs(auroc("notmnist_22k", "csd_aug") - auroc("notmnist_22k", "knn")) < 0.5
    assert round(auroc("kmnist_10k", "csd_aug") - auroc("kmnist_10k", "knn")) == -4

    def lead(name: str, rival: str, figure: str = "auroc_other") -> tuple[float, float]:
        difference = tables.compare(rows[name]["csd_post_hoc", False], rows[name][rival, False], figure)
        return difference.mean, difference.spread

    def not_ahead(figure: str) -> dict[tuple[str, str], float]:
        rivals = [(name, row.name) for name in rows for row in rows[name].values() if not row.ours]
        leads = {rival: lead(*rival, figure) for rival in rivals}
        return {rival: round(found, 2) for rival, (found, se) in leads.items() if found <= se}

    assert not_ahead("auroc") == {("notmnist_22k", "gp_post_hoc"): -0.26}
    behind = not_ahead("auroc_other")
    even = {("mnist", "gp_post_hoc"), ("mnist", "knn"), ("notmnist_22k", "ens15")}
    assert all(abs(lead(*rival)[0]) < lead(*rival)[1] for rival in even)
    assert {rival: found for rival, found in behind.items() if rival not in even} == {
        ("notmnist_22k", "knn"): -1.36,
        ("notmnist_22k", "gp_post_hoc"): -0.8,
        (table[-1].name, "knn"): -0.15,
    }
    assert round(lead(table[-1].name, "gp_post_hoc", "auroc_clipped")[0], 1) == 1.9
    assert round(lead(table[-1].name, "gp_post_hoc", "auroc")[0], 1) == 0.3
    assert min(auroc("mnist", method, "auroc_other") for method in ("csd_post_hoc", "gp_post_hoc", "knn")) >= 99.98


def test_the_words_about_times_hold() -> None:
    """What docs/results/cost.md and exploration.md say beside the tables."""
    cost, exploration = (
        " ".join((DOCS / "results" / f"{name}.md").read_text("utf-8").split()) for name in ("cost", "exploration")
    )

    def result(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))

    times = result("column")["times"]
    steps = 4000 / result("column")["steps"] - 1
    alone, compiled = (
        times[way]["all_s"] + steps * times[way]["steps_s"] for way in ("one after another", "together, compiled")
    )
    assert f"{compiled:.0f} s compiled and {alone:.0f} s one after another" in cost
    assert alone / compiled < 2
    csd = [result(f"shift/units/csd/fashion_mnist/seed{seed}")["cost"]["fit_s"] for seed in range(3)]
    assert f"{max(csd):.1f} s instead of {sorted(csd)[1]:.1f} s for CSD" in cost
    rate = result("agent")["loop"]["frames_per_second"]
    assert f"five million frames take {5e6 / rate / 60:.1f} minutes" in exploration
    assert f"missed by {1 - rate / (5e6 / 600):.0%}".replace("%", " %") in exploration
    assert result("environments")["frames_per_second"]["Workers"] > 3 * rate
    ratios = [
        stage[key] for stage in result("stages")["stages"].values() for key in ("speed_up", "speed_up_with_gradients")
    ]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times less time than cuDNN's" in exploration


def test_results_name_every_file_seed_and_what_the_data_are() -> None:
    text = (DOCS / "results" / "index.md").read_text("utf-8")
    for path in (ROOT / "results").iterdir():
        assert f"`{path.name}`" in text or f"`{path.name}/`" in text, (
            f"docs/results/index.md does not mention {path.name}"
        )
    assert "`kmnist_10k` is not KMNIST" in text


COMPARISON = (DOCS / "comparison.md").read_text("utf-8")
PACKAGES = ["laplace-torch", "torch-uncertainty", "pytorch-ood", "posteriors", "probly", "onefold"]


def test_the_comparison_is_dated() -> None:
    pattern = r"^\| \[([\w-]+)\]\(https://github\.com/[\w./-]+\) \| ([\d.]+) \| (\d{4}-\d\d-\d\d) \|"
    rows = re.findall(pattern, COMPARISON, re.M)
    assert [name for name, *_ in rows] == PACKAGES[:-1]
    assert re.search(r"as of \*\*\d{1,2} \w+ \d{4}\*\*", COMPARISON)
    assert f"| onefold | {onefold.__version__} |" in COMPARISON


def test_every_claim_of_the_comparison_says_where_to_look() -> None:
    """A mark "yes" or "part" has a file, in the table below it; one of onefold's own is there."""
    marks = re.findall(r"^\| (.+?)((?: \| (?:yes|part|–)){6}) \|$", COMPARISON, re.M)
    where = dict(re.findall(r"^    \| (.+?) \| (\*\*.+) \|$", COMPARISON, re.M))
    assert len(marks) == len(where) > 20
    for feature, cells in marks:
        having = [name for name, mark in zip(PACKAGES, cells.split(" | ")[1:], strict=True) if mark != "–"]
        places = dict(re.findall(r"\*\*([\w-]+)\*\* (.*?)(?=; \*\*|$)", where[feature]))
        assert list(places) == having, feature
        assert all("`" in place for place in places.values()), feature
        for path in re.findall(r"`([\w/]+(?:\.py|/))`", places.get("onefold", "")):
            assert (ROOT / "src" / "onefold" / path).exists(), path


def test_pages_have_no_dead_code_names() -> None:
    """`onefold.…` in backticks on these pages can be imported."""
    pages = [*(DOCS / f"{name}.md" for name in ("maths", "limits", "comparison")), *(DOCS / "results").iterdir()]
    for page in pages:
        for path in re.findall(r"`(onefold(?:\.\w+)+)", page.read_text("utf-8")):
            assert named(path) is not None
