"""Explanations: planted causes rank first, effects are differences of scores; text, command and page."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Opener
from test_methods import MAKERS, METHODS, SHORT, SMALL, fit, vectors
from test_score_page import NASTY, content, plain
from torch import nn
from users_models import regressor

import onefold
from onefold.cli import main
from onefold.detectors.explain import Explanation
from onefold.errors import InputError
from onefold.kernels import from_model
from onefold.report.score_page import render

DETECTORS: dict[str, Callable[[], Any]] = {
    "KNN": onefold.KNN,
    "LastLayerGP": lambda: onefold.LastLayerGP(width=256),
    "CSD": lambda: onefold.CSD(recipe=SHORT, architecture=SMALL),
}
every_detector = pytest.mark.parametrize("name", DETECTORS)


def waves(count: int, seed: int = 0, height: int = 20, width: int = 28) -> np.ndarray:
    """Smooth grey images: a wave along the rows with a random phase."""
    phase = np.random.default_rng(seed).uniform(0, 1, (count, 1, 1))
    row = np.arange(height)[:, None] / height
    return (120 + 60 * np.sin(2 * np.pi * (row + phase)) + np.zeros(width)).round().astype(np.uint8)


def flats(count: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    area = rng.lognormal(4.2, 0.4, count)
    rooms = (area / 25).round() + 1
    town = rng.choice(["north", "south", "harbour"], count, p=[0.5, 0.3, 0.2])
    return pd.DataFrame({"area": area, "rooms": rooms, "rent": 6 * area + rng.normal(0, 40, count), "town": town})


# --- planted causes ---------------------------------------------------------------------------------------------------


@every_detector
@pytest.mark.parametrize("axis", [None, 1, 3], ids=["grey", "channels first", "channels last"])
def test_a_changed_patch_ranks_first(name: str, axis: int | None) -> None:
    images = waves(122)
    images[120, 5:8, 17:21] = 255  # patch (2, 5) of 8 × 8: rows 5–7 and columns 18–20, with a border
    images[121, 12:15, 0:4] = 0  # patch (5, 0): rows 12–14 and columns 0–3
    images = images if axis is None else np.repeat(np.expand_dims(images, axis), 3, axis)
    first, second = DETECTORS[name]().fit(images[:120]).explain(images[120:])
    assert [first.order[0], second.order[0]] == [2 * 8 + 5, 5 * 8 + 0]
    assert first.parts[first.order[0]] == "rows 5–7, columns 18–20"
    assert first.edges == ((0, 2, 5, 8, 10, 12, 15, 18, 20), (0, 4, 7, 10, 14, 18, 21, 24, 28))
    assert first.heat_map.shape == (20, 28)
    assert np.unravel_index(first.heat_map.argmax(), (20, 28)) == (5, 18)
    assert np.unique(first.heat_map[5:8, 18:21]) == [first.effects.max()]


@every_detector
def test_one_wrong_column_ranks_first(name: str) -> None:
    rows = flats(4, seed=1)
    rows.loc[0, "rent"] = 9000
    rows.loc[1, "town"] = "castle"
    rows.loc[2, "area"] = np.nan
    rows.loc[3, "rooms"] = 60
    explanations = DETECTORS[name]().fit(flats(500)).explain(rows)
    assert [e.parts[e.order[0]] for e in explanations] == ["rent", "town", "area", "rooms"]
    assert [e.values[e.order[0]] for e in explanations] == ["9000", "(another)", "missing", "60"]


@every_detector
def test_one_wrong_entry_of_a_vector_ranks_first(name: str) -> None:
    x = vectors(3, 12, seed=1)
    x[[0, 1, 2], [7, 0, 11]] = (9, -9, 12)
    explanations = DETECTORS[name]().fit(vectors(400, 12)).explain(x)
    assert [e.order[0] for e in explanations] == [7, 0, 11]
    assert explanations[0].parts[7] == "x[7]"


# --- what the numbers are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_effects_are_differences_of_scores(name: str) -> None:
    x, query = vectors(), vectors(2, seed=1)
    detector = fit(name, x)
    stored = detector.remembered.numpy()
    median = np.sort(stored, axis=0)[(len(stored) - 1) // 2]
    for row, explanation in zip(query, detector.explain(query), strict=True):
        changed = np.where(np.eye(5, dtype=bool), median, row)
        np.testing.assert_allclose(explanation.effects, detector.score(row[None]) - detector.score(changed), atol=1e-6)
        np.testing.assert_allclose(explanation.score, detector.score(row[None])[0], atol=2e-6)
        assert explanation.typical == tuple(f"{value:.6g}" for value in median)


def test_a_patch_is_replaced_by_the_mean_image() -> None:
    images, query = waves(100), waves(1, seed=1)
    detector = onefold.KNN().fit(images)
    stored: Any = detector.remembered
    changed = query.copy()
    changed[:, 10:, 14:] = stored.double().mean(0).round().numpy().astype(np.uint8)[10:, 14:]
    (explanation,) = detector.explain(query, patches=2)
    assert explanation.parts == tuple(f"rows {r}, columns {c}" for r in ("0–9", "10–19") for c in ("0–13", "14–27"))
    assert explanation.effects[3] == pytest.approx(detector.score(query)[0] - detector.score(changed)[0], abs=1e-7)


def test_columns_are_replaced_by_median_and_most_frequent_category(tmp_path: Path) -> None:
    rows, query = flats(501), flats(1, seed=2)
    detector = onefold.LastLayerGP(width=64).fit(rows)
    medians = {name: float(np.median(rows[name])) for name in ("area", "rooms", "rent")}
    (explanation,) = detector.explain(query)
    assert explanation.typical == (*(f"{value:.6g}" for value in medians.values()), "north")
    for i, (name, value) in enumerate({**medians, "town": "north"}.items()):
        expected = detector.score(query) - detector.score(query.assign(**{name: value}))
        assert explanation.effects[i] == pytest.approx(expected[0], abs=1e-6)
    detector.save(tmp_path / "small.onefold", samples=False)
    (without,) = onefold.load(tmp_path / "small.onefold").explain(query)
    assert without.typical == (*(f"{rows[name].mean():.6g}" for name in medians), "north")
    assert without.nearest.shape == (0,)
    assert without.nearest_values == ()


def test_the_nearest_stored_samples_are_beside_it() -> None:
    x = vectors(50)
    detector = onefold.KNN().fit(x)
    (explanation,) = detector.explain(x[17:18])
    np.testing.assert_array_equal(explanation.nearest, detector.neighbours(x[17:18])[0])
    assert explanation.nearest_values == explanation.values


def test_a_column_without_stored_values_has_its_mean() -> None:
    rows = flats(60)
    detector = onefold.KNN().fit(rows)
    stored: Any = detector.remembered
    stored[:, 0] = torch.nan
    assert detector.explain(rows[:1])[0].typical[0] == f"{rows['area'].mean():.6g}"


# --- text -------------------------------------------------------------------------------------------------------------


def explanation(**changes: Any) -> Explanation:
    parts: dict[str, Any] = {
        "kind": "columns", "score": 3.0, "parts": ("a", "b\x1b[2J"), "effects": np.array([-0.5, 2.0]),
        "values": ("1", "one\ntwo"), "typical": ("2", "x" * 40), "nearest": np.array([4, 1]),
        "nearest_values": ("3", "y"),
    }  # fmt: skip
    return Explanation(**(parts | changes))


def test_the_text_lists_the_largest_effect_first_without_control_characters() -> None:
    assert str(explanation()).splitlines() == [
        "score 3; with one of 2 columns replaced by a typical value, it falls by:",
        "fall  column      value         typical                           nearest",
        f"+2    b\\u001b[2J  one\\u000atwo  {'x' * 31}…  y",
        "-0.5  a           1             2                                 3",
        "nearest training samples: 4, 1",
    ]
    bare = explanation(kind="values", nearest=np.zeros(0, np.int64), nearest_values=())
    assert str(bare).splitlines()[1].split() == ["fall", "entry", "value", "typical"]
    many = explanation(parts=("p",) * 12, effects=np.arange(12.0), values=("v",) * 12, typical=("t",) * 12,
                       nearest_values=("n",) * 12)  # fmt: skip
    assert "and 2 more" in str(many)


def test_the_text_of_an_image_has_a_heat_map() -> None:
    effects = np.array([-1.0, 0.0, 0.5, 1.0])
    grid = explanation(kind="patches", parts=("p", "q", "r", "s"), effects=effects, edges=((0, 2, 3), (0, 1, 2)))
    assert str(grid).splitlines()[1:3] == ["|    |         +1  s", "|▒▒██|       +0.5  r"]
    np.testing.assert_array_equal(grid.heat_map, [[-1, 0], [-1, 0], [0.5, 1]])
    flat = explanation(kind="patches", parts=("p",) * 4, effects=-effects - 2, edges=((0, 2, 3), (0, 1, 2)))
    assert "█" not in str(flat)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_inputs_without_parts_or_samples_are_refused(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.float())

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.fc(a)

    integers = np.random.default_rng(0).integers(0, 5, (50, 4))
    with pytest.raises(InputError, match=r"explain\(\) supports images, tables and vectors.*as given, x int64"):
        onefold.KNN(from_model(Whole())).fit(integers).explain(integers[:1])
    named = {"a": vectors(50, 4)}
    with pytest.raises(InputError, match="named, a float32"):
        onefold.KNN(from_model(Named())).fit(named).explain(named)
    detector = MAKERS["KNN"]().fit(vectors())
    detector.save(tmp_path / "small.onefold", samples=False)
    with pytest.raises(InputError, match=r"no training samples in this detector.*samples=True to use explain"):
        onefold.load(tmp_path / "small.onefold").explain(vectors(1))
    with pytest.raises(InputError, match="patches: must be an integer of at least 1"):
        detector.explain(vectors(1), patches=0)
    with pytest.raises(InputError, match="explanation: columns have no heat map"):
        _ = explanation().heat_map


def test_a_model_explains_its_vectors() -> None:
    x = vectors(60)
    x[0, 3] = 50
    (first,) = onefold.KNN(from_model(regressor())).fit(x[1:]).explain(x[:1])
    assert first.kind == "values"
    assert len(first.effects) == 5


# --- command and page -------------------------------------------------------------------------------------------------


def test_the_command_explains_the_least_familiar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = flats(60, seed=1)
    rows.loc[7, "rent"], rows.loc[41, "town"] = 20000, "castle"
    detector = onefold.LastLayerGP(width=64).fit(flats(300)).calibrate(flats(100, seed=2))
    detector.save(tmp_path / "flats.onefold")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    command = ["score", str(tmp_path / "flats.onefold"), str(tmp_path / "rows.csv"), "-o", str(tmp_path / "s.csv")]
    assert main([*command, "--explain", "2", "--report", str(tmp_path / "s.html")]) == 0
    scores = pd.read_csv(tmp_path / "s.csv")["score"]
    worst = np.argsort(-scores.to_numpy())[:2].tolist()
    assert sorted(worst) == [7, 41]
    blocks = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")[1:]]
    assert [int(block[0]) for block in blocks] == worst
    cause = {7: ("rent", "20000"), 41: ("town", "(another)")}
    assert [tuple(block[3].split()[1:3]) for block in blocks] == [cause[i] for i in worst]
    explanations = content((tmp_path / "s.html").read_text("utf-8"))["explanations"]
    assert {int(i): e["parts"][0] for i, e in explanations.items()} == {7: "rent", 41: "town"}
    assert main([*command, "--explain", "-1"]) == 2
    assert capsys.readouterr().err == "onefold: --explain: must be an integer of at least 0, not -1\n"


def test_the_page_holds_the_largest_effects_and_escapes_their_text() -> None:
    count = 30
    many = explanation(parts=(NASTY[0],) * count, effects=np.arange(float(count)), values=(NASTY[1],) * count,
                       typical=(NASTY[2],) * count, nearest_values=(NASTY[3],) * count)  # fmt: skip
    page = render(plain(40, explanations={3: many}))
    data = content(page)["explanations"]["3"]
    assert data["effects"] == list(range(29, 5, -1))
    assert data["count"] == count
    assert data["nearest"][0] == "photo\\u202egpj.exe"
    assert "alert(1)" in json.dumps(data["parts"])
    assert not re.search(r"<img|<!--<script", page)
    with pytest.raises(InputError, match="explanation of input 40"):
        render(plain(40, explanations={40: many}))


def test_an_opened_input_shows_what_raises_its_score(opened: Opener, tmp_path: Path) -> None:
    images = np.zeros((2, 6, 6), np.uint8)
    heat = explanation(kind="patches", parts=("p", "q", "r", "corner"), effects=np.array([-1.0, 0.0, 0.5, 1.0]),
                       edges=((0, 2, 6), (0, 3, 6)), values=(), typical=(), nearest_values=())  # fmt: skip
    (tmp_path / "images.html").write_text(render(plain(2, pictures=images, explanations={1: heat})), "utf-8")
    tab = opened(tmp_path / "images.html", reduced_motion="reduce")
    tab.locator("[data-item='1']").click()
    script = "(c) => [...c.getContext('2d').getImageData(0, 0, 6, 6).data].filter((_, i) => i % 4 === 3)"
    alpha = np.array(tab.locator(".heat").evaluate(script)).reshape(6, 6)
    np.testing.assert_allclose(alpha[2:, 3:], 0.75 * 255, atol=1)
    np.testing.assert_allclose(alpha[2:, :3], 0.375 * 255, atol=1)
    assert not alpha[:2].any()
    assert "(corner), the score falls by 1." in tab.locator(".hint").inner_text()
    box, picture = (tab.locator(f".large {name}").bounding_box() for name in (".heat", "canvas:first-child"))
    assert box == picture
    tab.locator("#detail .tick input").uncheck()
    assert not tab.locator(".heat").is_visible()
    tab.locator("#next").click()
    assert tab.locator(".heat").count() == 0
    hostile = explanation(parts=(NASTY[0], "b"), values=(NASTY[1], "<b>1</b>"))
    (tmp_path / "rows.html").write_text(render(plain(2, explanations={0: hostile})), "utf-8")
    tab = opened(tmp_path / "rows.html", 390, 800)
    tab.locator("[data-item='0']").click()
    cells = tab.locator(".reasons tr").all_inner_texts()
    assert cells[0].split("\t") == ["Column", "Fall", "Value", "Typical", "Nearest familiar"], "no bars"
    assert [cells[1].split("\t")[i] for i in (0, 1, 2)] == ["b", "+2", "<b>1</b>"]
    assert cells[2].split("\t")[0] == NASTY[0]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.locator("#detail").evaluate("(d) => d.scrollWidth <= d.clientWidth")
