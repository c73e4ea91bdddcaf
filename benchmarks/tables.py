"""Rewrite the tables of the README and of the site from the committed result files.

python benchmarks/tables.py
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from onefold.bench.evaluate import mean_over_sets
from onefold.bench.results import KEPT_SHARES, Collected, collect
from onefold.bench.rows import ABLATION, ROWS, select_rows
from onefold.report.bench_table import Section, TableRow, build_table, shown_sections
from onefold.report.bench_text import (
    HEADS,
    compare,
    format_column,
    format_difference,
    list_remarks,
    section_title,
    text_tables,
)
from onefold.report.tables import Cell, escape_markdown, markdown_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
SETS = ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k")
FIXED = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"  # a figure and its spread stay on one line


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


@cache
def shift() -> tuple[Collected, list[Section]]:
    """Return the results of the distribution-shift benchmark and its sections, the average last."""
    collected = collect(RESULTS / "shift")
    assert not collected.skipped, f"damaged results: {collected.skipped}"
    return collected, build_table(collected.units)


def detectors() -> list[str]:
    cells = result("detectors")["cells"]
    rows = [f"| method | {' | '.join(SETS)} |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(cell.split("/")[0] for cell in cells):
        for kind in cells[f"{method}/mnist/seed0"]:
            if kind == "accuracy" or (kind != "score" and not method.startswith("CSD")):
                continue
            label = method if kind == "score" else f"{method}, by {kind}"
            rows.append(f"| {label} | {' | '.join(_auroc(method, name, kind) for name in SETS)} |")
    return rows


def _auroc(method: str, name: str, kind: str = "score") -> str:
    """The mean of two seeds."""
    cells = result("detectors")["cells"]
    return f"{sum(cells[f'{method}/{name}/seed{seed}'][kind]['mean'] for seed in (0, 1)) / 2:.1f}"


def small() -> list[str]:
    """The two sets of few images, from the same file."""
    rows = [[method, *(_auroc(method, name) for name in SETS[2:])] for method in SMALL]
    return markdown_rows(["method", *map(escape_markdown, SETS[2:])], rows)


SMALL = (
    "CSD, no augmentation",
    "CSD",
    "LastLayerGP",
    "ENS(5)",
    "KNN on a trained model",
    "LastLayerGP on a trained model",
    "CSD on a trained model",
)


def scoring() -> list[str]:
    cpu, gpu = (result(f"scoring_{device}")["passes"] for device in ("cpu", "gpu"))

    def shown(passes: dict[str, float], name: str) -> str:
        value = passes.get(name)
        return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"

    rows = ["| | two CPU cores | one H200 |", "|---|---|---|"]
    return rows + [f"| {name} | {shown(cpu, name)} | {shown(gpu, name)} |" for name in cpu]


def on_model() -> list[str]:
    """What CSD costs on a trained model: passes of the model to score, and seconds of a fit with both scores."""
    models = result("scoring_on_model")["models"]
    names = list(models)
    rows = [
        [what, *(f"{models[name]['passes'][what]:.2f}" for name in names)]
        for what in models[names[0]]["passes"]
        if what != "plain pass"
    ]
    fits, share = result("fit_on_model")["fits"], result("fit_on_model")["share_of_the_time"]["cpu_s"]
    note = (
        f"A fit on 9,000 images takes {fits['surprisal']['cpu_s']:.0f} CPU seconds, {share:.0%} of the "
        f'{fits["combined"]["cpu_s"]:.0f} with the score "combined".'
    )
    return [*markdown_rows(["passes of the model", *names], rows), "", note]


def default_score() -> list[str]:
    """AUROC of the default score and its rivals on small classifiers, by OOD set."""
    cells = result("default_score")["cells"]
    rows = []
    for name in dict.fromkeys(key.split("/")[1] for key in cells):
        others = [other for other in (*SETS, "perturbed", "perturbed_clipped") if other != name]
        for key, cell in cells.items():
            if key.split("/")[1] == name:
                label = key.split("/")[0]
                foreign = [cell[other] for other in others[:4]]
                figures = {other: f"{cell[other]:.1f}" for other in others}
                figures[name] = "–"
                rows.append(
                    [
                        name,
                        label,
                        f"{mean(foreign):.1f}",
                        *(figures[o] for o in (*SETS, "perturbed", "perturbed_clipped")),
                    ]
                )
    heads = ["familiar", "detector", "mean of four", *SETS, "perturbed", "perturbed, clipped"]
    return markdown_rows(heads, rows, text_columns=2)


COMMANDS = {
    "agent.json": "python benchmarks/agent.py --out results/agent.json",
    "column.json": "python benchmarks/column.py --out results/column.json",
    "default_score.json": "python benchmarks/default_score.py DATASETS --ood --out results/default_score.json",
    "detectors.json": "python benchmarks/detectors.py DATASETS --out results/detectors.json",
    "environments.json": "python benchmarks/environments.py --out results/environments.json",
    "environments_two_cores.json": (
        "python benchmarks/environments.py --count 2 4 16 --out results/environments_two_cores.json"
    ),
    "fit.json": "python benchmarks/fit.py --out results/fit.json",
    "fit_on_model.json": "python benchmarks/fit.py --on-model --out results/fit_on_model.json",
    "growth.json": "python benchmarks/growth.py --out results/growth.json",
    "monitor.json": "python benchmarks/monitor.py --out results/monitor.json",
    "scoring_cpu.json": "python benchmarks/scoring.py --out results/scoring_cpu.json",
    "regression.json": "python benchmarks/regression.py -o results/regression.json",
    "scoring_gpu.json": "python benchmarks/scoring.py --out results/scoring_gpu.json",
    "scoring_on_model.json": "python benchmarks/scoring.py --on-model --out results/scoring_on_model.json",
    "stages.json": "python benchmarks/stages.py --out results/stages.json",
    "toy.json": "onefold toy --out out/toy",
    "ablation": "onefold bench ablate -o results/ablation",
    "bonuses": "python benchmarks/bonuses.py -o results/bonuses",
    "shift": "onefold bench run -o results/shift --preset paper",
}


def provenance() -> list[str]:
    """Every result file, or folder of them, what it says about its making, and the command that writes it."""
    rows, notes = [], []
    for path in sorted(RESULTS.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        files = [path] if path.is_file() else sorted(path.rglob("*.json"))
        made = [content for file in files if "commit" in (content := json.loads(file.read_text("utf-8")))]
        name = f"`{path.name}`" if path.is_file() else f"`{path.name}/`, {len(made)} file{'s'[: len(made) > 1]}"
        days, machines, torches = (_all_of(made, part) for part in ("date", "device", "torch"))
        machine = f"{machines}, {_all_of(made, 'cores')} cores"
        rows.append([name, days, _all_of(made, "commit"), machine, torches, f"`{COMMANDS[path.name]}`"])
        notes += [
            f"{name}: {note}."
            for note in sorted({content["commit_note"] for content in made if "commit_note" in content})
        ]
    listed = ["", "What files say about their commit:", "", *(f"- {note}" for note in notes)] if notes else []
    return [
        *markdown_rows(["in `results/`", "date", "commit", "machine", "torch", "command"], rows, text_columns=6),
        *listed,
    ]


def _all_of(made: Sequence[dict[str, Any]], part: str) -> str:
    values = sorted({str(result[part])[: 10 if part == "date" else None] for result in made})
    return ", ".join(f"`{name}`" if part == "commit" else name for name in values)


def toy() -> list[str]:
    content = result("toy")
    rows = [[pair, f"{value:.3f}"] for pair, value in content["plane"]["rank_correlation"].items()]
    error = content["line"]["mean_relative_error"]
    queries = len(content["line"]["queries"])
    note = (
        f"On the line, for {queries} queries known beforehand, the variance is off by {100 * error:.1f} % on average."
    )
    return [*markdown_rows(["compared on the plane", "rank correlation"], rows), "", note]


def shift_fit() -> list[str]:
    """Time to fit on fashion_mnist, of the units that had the machine to themselves."""
    units = [unit for unit in shift()[0].units if unit.id_set == "fashion_mnist" and unit.alone]
    times = {name: [unit.cost["fit_s"] for unit in units if unit.row == name] for name in FITTED}
    longest = median(times[FITTED[0]])
    rows = [
        [ROWS[name].title, f"{median(seconds):.1f}", str(len(seconds)), f"{longest / median(seconds):.1f} ×"]
        for name, seconds in times.items()
    ]
    return markdown_rows(["method", "fit, s (median)", "units", f"less than {ROWS[FITTED[0]].title}"], rows)


FITTED = ("ens15", "ens3", "csd", "csd_aug", "csd_post_hoc")


def growth() -> list[str]:
    content = result("growth")
    heads = ["seconds", *(f"{rows:,} rows" for rows in content["rows"])]
    rows = [
        [f"{method}, {part}", *(f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}" for seconds in times)]
        for method, parts in content["seconds"].items()
        for part, times in parts.items()
    ]
    return markdown_rows(heads, rows)


def monitor_level() -> list[str]:
    content, cells = result("monitor"), {}
    for name, cell in result("monitor")["level"].items():
        samples, alpha, ties = (part.partition("=")[2] or part for part in name.split("/"))
        assert cell["valid"], f"{name}: more false alarms than alpha"
        cells.setdefault((int(samples), alpha), {})[ties] = cell
    rows = [
        [f"{samples:,}", alpha, *(f"{cell['share']:.5f}" for cell in by_ties.values())]
        for (samples, alpha), by_ties in cells.items()
    ]
    heads = ["calibration samples", "`alpha`", "share of false alarms", "with ties"]
    note = f"{content['streams']:,} streams in each cell. The lower 99 % limit of every share is at most `alpha`."
    return [*markdown_rows(heads, rows), "", note]


def monitor_delay() -> list[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    shares: list[str] = []
    for name, cell in result("monitor")["delay"].items():
        samples, share, before = (part.partition("=")[2] for part in name.split("/"))
        median, late = (f"{wait:,}" if wait is not None else "–" for wait in (cell["median"], cell["quantile_90"]))
        rows.setdefault((samples, before), []).append(f"{median} / {late}")
        shares += [share] if share not in shares else []
    ordered = sorted(rows.items(), key=lambda row: tuple(map(int, row[0])))
    heads = ["calibration samples", "familiar inputs before", *(f"{float(share):.0%} unfamiliar" for share in shares)]
    return markdown_rows(heads, [[f"{int(n):,}", f"{int(before):,}", *cells] for (n, before), cells in ordered])


def fit() -> list[str]:
    rows = [
        [f"{contexts}, {way}", *(f"{times[part]:.{n}f}" for part, n in FIT), f"{times['speed_up']:.1f} ×"]
        for contexts, ways in result("fit")["times"].items()
        for way, times in ways.items()
        if way != "floor"
    ]
    floors = [ways["floor"] for ways in result("fit")["times"].values()]
    one, times = floors[0], " and ".join(f"{floor['captured_over_floor']:.0f}" for floor in floors)
    note = (
        f"The arithmetic alone, {one['operations_g']:.0f} · 10⁹ operations at the {one['rate_t']:.0f} · 10¹² a second "
        f"of a large matrix product there, would take {one['floor_ms']:.2f} ms: captured steps take {times} times that."
    )
    heads = ["contexts and loop", "step, ms", "set-up, s", "memory beyond the data, MiB", "against plain"]
    return [*markdown_rows(heads, rows), "", note]


FIT = (("step_ms", 2), ("set_up_s", 1), ("memory_mib", 0))


def column() -> list[str]:
    """Ten seeds one after another and together."""
    rows = [
        [way, *(f"{times[part]:.1f}" for part in ("all_s", "set_up_s", "steps_s")), f"{times['speed_up']:.2f} ×"]
        for way, times in result("column")["times"].items()
    ]
    return markdown_rows(
        [f"{result('column')['seeds']} seeds", "all, s", "set-up, s", "steps, s", "against the first"], rows
    )


def ablation() -> list[str]:
    """Every form of CSD by all three of its scores, on every set; what its labels cost."""
    units = collect(RESULTS / "ablation").units
    names = list(dict.fromkeys(unit.id_set for unit in units))
    rows = []
    for method in (name for name in ABLATION if any(unit.row == name for unit in units)):
        by_set = [[unit for unit in units if (unit.row, unit.id_set) == (method, name)] for name in names]
        figures = [
            _spread([mean_over_sets(unit.scores[kind], "auroc")[0] for unit in of_set])
            for of_set in by_set
            for kind in KINDS
        ]
        alone = [unit.cost["fit_s"] for of_set in by_set for unit in of_set if unit.alone]
        seconds = f"{median(alone):.0f}" if alone else "–"
        rows.append(
            [escape_markdown(ROWS[method].title), *figures, seconds, "/".join(str(len(of_set)) for of_set in by_set)]
        )
    heads = [
        f"{escape_markdown(name)}, {kind}"
        for name in names
        for kind in ("default score", "variance", "relative variance")
    ]
    return markdown_rows(["form of CSD", *heads, "fit, s", "seeds"], rows)


KINDS = ("score", "variance", "relative")


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f"{FIXED}{stdev(values):.1f}" if len(values) > 1 else "")


def bonuses() -> list[str]:
    """Agents of stable-baselines3 with and without a bonus; tuning runs are left out."""
    rows = []
    for task in sorted(path for path in (RESULTS / "bonuses").iterdir() if path.is_dir()):
        all_runs = [json.loads(path.read_text("utf-8")) for path in sorted(task.glob("*.json"))]
        for name, label in (("none", "no bonus"), ("rnd", "RND"), ("csd", "CSD")):
            runs = [run for run in all_runs if run["bonus"] == name and run["seed"] != 100]
            if runs:
                rows.append([task.name, label, str(len(runs)), *_bonus_row(runs)])
    return markdown_rows(
        ("task", "bonus", "seeds", "β", "rate", "mean return", "last tenth", "time for the bonus"), rows, 2
    )


def _bonus_row(runs: Sequence[dict[str, Any]]) -> list[str]:
    settings = ["–", "–"] if runs[0]["bonus"] == "none" else [f"{runs[0]['beta']:g}", f"{runs[0]['rate']:g}"]
    spread = stdev if len(runs) > 1 else lambda _: 0.0
    figures = [
        f"{mean(r[part] for r in runs):.2f}{FIXED}{spread([r[part] for r in runs]):.2f}"
        for part in ("mean_return", "last_tenth")
    ]
    share = sum(run["bonus_seconds"] for run in runs) / sum(run["seconds"] for run in runs)
    return [*settings, *figures, f"{share:.0%}"]


def agent() -> list[str]:
    """An update of one agent in three forms, and its loop."""
    content = result("agent")
    rows = [
        [way, *(f"{times[part]:.{places}f}" for part, places in AGENT), f"{times['speed_up']:.1f} ×"]
        for way, times in content["updates"].items()
    ]
    loop, memory = content["loop"], content["memory"]
    note = (
        f"The whole loop makes {loop['frames_per_second']:,.0f} frames a second, {loop['iteration_ms']:.2f} ms for "
        f"{content['environments']} of them, and the GPU is idle for {loop['gpu_idle_share']:.1%} of the time. Memory: "
        f"{memory['gpu_gb']:.1f} GB on the GPU, {memory['host_gb']:.1f} in the process."
    )
    return [*markdown_rows(["form", "update, ms", "actions, ms", "set-up, s", "against eager"], rows), "", note]


AGENT = (("update_ms", 2), ("act_ms", 2), ("set_up_s", 1))


def environments() -> list[str]:
    """Frames per second of vector environments, by machine and number of environments."""
    files = [result("environments_two_cores"), result("environments")]
    rows = [
        [
            f"{file['cores']}",
            f"{row['environments']}",
            *(f"{row['frames_per_second'][key]:,.0f}" for key in ENVIRONMENTS),
            f"{row['workers_over_async']:.2f} ×",
        ]
        for file in files
        for row in file.get("rows", [file])
    ]
    heads = ["cores", "environments", "one environment", "AsyncVectorEnv", "onefold", "onefold / AsyncVectorEnv"]
    return markdown_rows(heads, rows, 0)


ENVIRONMENTS = ("one environment", "AsyncVectorEnv", "Workers")


def stages() -> list[str]:
    """Times of the fused network stages and of cuDNN's."""
    rows = [
        [
            name,
            *(f"{times[f'{way}_us']:.0f}" for way in STAGES),
            *(f"{times[f'speed_up{part}']:.1f} ×" for part in PARTS),
        ]
        for name, times in result("stages")["stages"].items()
    ]
    heads = ["stage", "fused, µs", "cuDNN, µs", "fused with gradients, µs", "cuDNN with gradients, µs"]
    return markdown_rows([*heads, "speed-up", "speed-up with gradients"], rows)


STAGES = ("fused", "cudnn", "fused_with_gradients", "cudnn_with_gradients")
PARTS = ("", "_with_gradients")


def data() -> list[str]:
    """How many images the units of the benchmark were fitted and tested on."""
    sizes = {unit.id_set: (f"{unit.train:,}", f"{unit.tested[unit.id_set]:,}") for unit in shift()[0].units}
    rows = [[escape_markdown(section.name), *sizes[section.name]] for section in shift()[1][:-1]]
    return markdown_rows(["set", "images to learn from", "images to test on"], rows)


def spans(seeds: Sequence[int]) -> str:
    """Seeds in few words: 0, 2–5."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts) or "–"


def shift_units() -> list[str]:
    """Which methods have been run with which seeds, and which of the paper's and ours have not."""
    collected, table = shift()
    names = [section.name for section in table[:-1]]
    rows, main_table = [], [row.name for row in select_rows(())]
    titles = {unit.row: ", ".join([unit.title, unit.variant][: 1 + (unit.row not in ROWS)]) for unit in collected.units}
    for method in (name for name in dict.fromkeys([*main_table, *titles]) if name in titles):
        seeds = [
            sorted(unit.seed for unit in collected.units if (unit.row, unit.id_set) == (method, name)) for name in names
        ]
        rows.append([escape_markdown(titles[method]), *map(spans, seeds)])
    absent = [ROWS[name].title for name in main_table if all(unit.row != name for unit in collected.units)]
    notes = [f"Not run yet: {'; '.join(map(escape_markdown, absent))}."] if absent else []
    notes += map(escape_markdown, list_remarks(collected))
    return [*markdown_rows(["seeds of", *map(escape_markdown, names)], rows, 5), *(f"\n{note}" for note in notes)]


def shift_auroc() -> list[str]:
    return _by_set("auroc")


def shift_other_sets() -> list[str]:
    return _by_set("auroc_other")


HEADLINE = (
    "csd_post_hoc", "csd_aug", "csd", "gp_post_hoc", "knn", "ens15", "ens3", "last_layer_gp", "sgmcmc-baoa", "laplace",
    "mcd", "rnd",
)  # fmt: skip


def shift_headline() -> list[str]:
    """Return the README's table: mean AUROC of the main methods, best first."""
    sections = shift()[1][:-1]
    aurocs: dict[str, list[float]] = {}
    for section in sections:
        rows = {row.name: row for row in section.rows if not row.by_paper_score}
        for row in (rows[name] for name in HEADLINE):
            aurocs.setdefault(row.title, []).append(row.auroc)
    order = sorted(aurocs.items(), key=lambda item: -mean(item[1]))
    heads = ["AUROC, %", *(f"`{section.name}`" for section in sections)]
    return markdown_rows(heads, [[title, *(f"{value:.1f}" for value in values)] for title, values in order])


def _by_set(figure: str) -> list[str]:
    """Return a figure of every method on every set, and its average over the seeds that were run on all sets."""
    sections = shift()[1]
    cells: dict[tuple[str, bool], dict[str, Cell]] = {}
    titles: dict[tuple[str, bool], str] = {}
    seeds: dict[tuple[str, bool], set[int]] = {}
    for section in sections:
        for row, cell in zip(section.rows, format_column(section.rows, figure, digits=1), strict=True):
            cells.setdefault(_key(row), {})[section.name] = cell
            titles[_key(row)] = row.title + (", by the paper's score" if row.by_paper_score else "")
            seeds.setdefault(_key(row), set()).add(len(row.seeds))
    heads = [HEADS[figure], "seeds", *(escape_markdown(section.name) for section in sections[:-1]), "average"]
    ours = {row.name for section in sections for row in section.rows if row.ours}
    names = [*ROWS, *dict.fromkeys(name for name, _ in titles)]  # rows of other programs come last
    order = sorted(titles, key=lambda key: (key[0] not in ours or key[1], key[1], names.index(key[0])))
    rows = [
        [
            titles[key],
            "–".join(str(count) for count in sorted(seeds[key])),
            *(_short(cells[key][s.name]) if s.name in cells[key] else "–" for s in sections),
        ]
        for key in order
    ]
    return markdown_rows(heads, rows)


def _short(cell: Cell) -> str:
    """With one decimal for the gap, too, and broken before it if at all."""
    gap = f"{float(cell.gap.replace('−', '-')):+.1f}".replace("-", "−") if cell.gap else ""
    return escape_markdown(cell._replace(gap=gap)).replace(" ± ", FIXED)


def _key(row: TableRow) -> tuple[str, bool]:
    return row.name, row.by_paper_score


def shift_differences() -> list[str]:
    """Return the AUROC of CSD on the classifier less that of every rival, over all OOD sets and over other sets."""
    sections = shift()[1]
    cells: dict[str, list[str]] = {}
    for section in sections:
        ours = next(row for row in section.rows if _key(row) == ("csd_post_hoc", False))
        for rival in (row for row in section.rows if not row.ours):
            both = "<br>".join(format_difference(compare(ours, rival, name)) for name in ("auroc", "auroc_other"))
            cells.setdefault(f"less {rival.title}", []).append(both.replace(" (no s.e.)", "").replace(" ± ", FIXED))
    return markdown_rows(
        ["", *(escape_markdown(section.name) for section in sections[:-1]), "average"],
        [[k, *v] for k, v in cells.items()],
    )


def shift_sets() -> list[str]:
    """Return all figures set by set, each set in a box that opens."""
    shown = shown_sections(shift()[1])
    return [line for section in shown for line in folded(section_title(section), _section(section))][:-1]


def folded(title: str, rows: Sequence[str]) -> list[str]:
    """Return the rows in a box that opens."""
    return [f'??? note "{title}"', "", *(f"    {line}".rstrip() for line in "\n".join(rows).split("\n"))]


def _section(section: Section) -> list[str]:
    lines = [line for note in section.notes for line in (escape_markdown(note), "")]
    for table in text_tables(section)[:2]:
        heads = [*map(escape_markdown, table.heads)]
        rows = [[escape_markdown(cell).replace(" ± ", FIXED) for cell in cells] for _, cells in table.rows]
        lines += [*markdown_rows(heads, rows, table.text_columns), ""]
    return lines


RISK_ROWS = (
    "csd_post_hoc", "gp_post_hoc-noflips", "knn-noflips", "energy-noflips", "mcd-noflips", "laplace-noflips",
    "ens3-noflips", "ens15-noflips",
)  # fmt: skip
RISK_SHARES = (1.0, 0.8, 0.5)


def risk() -> list[str]:
    """Wrong predictions among all, and among the 80 % and 50 % with the smallest scores, in per cent, by set."""
    units = shift()[0].units
    at = [KEPT_SHARES.index(share) for share in RISK_SHARES]
    rows = []
    for name in RISK_ROWS:
        of_row = [unit for unit in units if unit.row == name]
        cells = [
            " / ".join(
                f"{100 * mean(1 - unit.rejection[i] for unit in of_row if unit.id_set == id_set):.2f}" for i in at
            )
            for id_set in SETS
        ]
        seeds = len({unit.seed for unit in of_row})
        score = of_row[0].default.replace("_", " ")
        rows.append([f"{escape_markdown(ROWS[name].title)} ({score})".replace(" (score)", ""), str(seeds), *cells])
    return markdown_rows(["ordered by", "seeds", *map(escape_markdown, SETS)], rows)


REGRESSION = (
    ("diabetes", "test"), ("synthetic", "in the clusters"), ("synthetic", "between them"),
    ("synthetic", "beyond them"),
)  # fmt: skip


def regression() -> list[str]:
    """Negative log-likelihood and coverage of 90 % intervals, by method and group of test samples."""
    cells = result("regression")["cells"]
    rows = []
    for method in next(iter(cells.values())):
        row = [method]
        for data_set, group in REGRESSION:
            figures = [by_method[method][group] for name, by_method in cells.items() if name.startswith(f"{data_set}/")]
            nll = [figure["nll"] for figure in figures]
            row.append(f"{_spread_2(nll)}; {100 * mean(figure['coverage'] for figure in figures):.0f} %")
        rows.append(row)
    heads = [f"{data_set}, {group}" if group != "test" else data_set for data_set, group in REGRESSION]
    return markdown_rows(["error bars of", *heads], rows)


def _spread_2(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}{FIXED}{stdev(values):.2f}".replace("-", "−")


@dataclass(frozen=True)
class Figure:
    """A published figure: the script that draws it, its files, the page that shows it and the results it reads.

    Args:
        script: Script that draws it.
        names: Names of its files without the ending.
        page: Page that shows it.
        sources: Names in `results/` that it is drawn from.
        computed: True if the script computes what the figure shows, and reads at most a part of it from results.
        dark: True if it has a second version for dark pages.
    """

    script: str
    names: tuple[str, ...]
    page: str
    sources: tuple[str, ...] = ()
    computed: bool = False
    dark: bool = True

    def file_names(self) -> list[str]:
        """Return the names of its files."""
        return [f"{name}{suffix}.png" for name in self.names for suffix in ("", "_dark")[: 1 + self.dark]]


IDEA = ("idea_disagree", "idea_infinite", "idea_queries", "idea_contexts")
FIGURES = (
    Figure("docs/figures/shift.py", ("shift",), "docs/results/detection.md", ("shift",)),
    Figure("docs/figures/risk.py", ("risk",), "docs/which-method.md", ("shift",)),
    Figure("docs/figures/bonuses.py", ("bonuses",), "docs/results/exploration.md", ("bonuses",)),
    Figure("docs/figures/growth.py", ("growth",), "docs/results/cost.md", ("growth.json",), dark=False),
    Figure("onefold toy", ("toy_1d",), "docs/maths.md", ("toy.json",), computed=True, dark=False),
    Figure("onefold toy", ("toy_2d",), "docs/results/detection.md", ("toy.json",), computed=True, dark=False),
    Figure("docs/figures/idea.py", IDEA, "docs/idea.md", computed=True),
    Figure("docs/figures/idea.py", ("idea_pass",), "docs/idea.md", ("scoring_cpu.json",), computed=True),
)
SOURCES = {
    "shift_headline": ("shift",),
    "shift_auroc": ("shift",),
    "shift_other_sets": ("shift",),
    "shift_differences": ("shift",),
    "shift_units": ("shift",),
    "shift_sets": ("shift",),
    "shift_fit": ("shift",),
    "risk": ("shift",),
    "regression": ("regression.json",),
    "default_score": ("default_score.json",),
    "on_model": ("scoring_on_model.json", "fit_on_model.json"),
    "data": ("shift",),
    "monitor_level": ("monitor.json",),
    "monitor_delay": ("monitor.json",),
    "detectors": ("detectors.json",),
    "small": ("detectors.json",),
    "ablation": ("ablation",),
    "toy": ("toy.json",),
    "bonuses": ("bonuses",),
    "agent": ("agent.json",),
    "stages": ("stages.json",),
    "environments": ("environments.json", "environments_two_cores.json"),
    "scoring": ("scoring_cpu.json", "scoring_gpu.json"),
    "fit": ("fit.json",),
    "column": ("column.json",),
    "growth": ("growth.json",),
}
"""The names in `results/` that each table is made from; `provenance` reads all of them."""


def reproduce() -> list[str]:
    """Every result file or folder: what is published from it, the command that makes it, its machine and its time."""
    rows = []
    for name, command in COMMANDS.items():
        path = RESULTS / name
        files = [path] if path.is_file() else sorted(path.rglob("*.json"))
        made = [content for file in files if "commit" in (content := json.loads(file.read_text("utf-8")))]
        machine = f"{_all_of(made, 'device')}, {_all_of(made, 'cores')} cores"
        time = shown_time(sum(map(RECORDED[name], made))) if name in RECORDED else "–"
        rows.append([f"`{name}`", _published(name), f"`{command}`", machine, time])
    return markdown_rows(["in `results/`", "published in", "command", "machine", "recorded time"], rows, 5)


def _published(name: str) -> str:
    """Return links to the pages that show a result file or folder, with the names of tables and figures."""
    shown: dict[str, list[str]] = {}
    for page, writers in PAGES.items():
        for writer in writers:
            if name in SOURCES.get(writer.__name__, ()):
                shown.setdefault(page, []).append(f"`{writer.__name__}`")
    for figure in FIGURES:
        if name in figure.sources:
            shown.setdefault(figure.page, []).extend(f"`{file}.png`" for file in figure.names)
    links = {page: "index.md" if page == "README.md" else page.removeprefix("docs/") for page in shown}
    return "<br>".join(f"[{links[page]}]({links[page]}): {', '.join(names)}" for page, names in shown.items())


def _seconds_of_unit(content: dict[str, Any]) -> float:
    """Return the seconds to fit, and to score all test images once."""
    images = content["data"]["test"] + sum(content["data"]["ood"].values())
    return content["cost"]["fit_s"] + content["cost"]["score_us"] / 1e6 * images


RECORDED: dict[str, Callable[[dict[str, Any]], float]] = {
    "shift": _seconds_of_unit,
    "ablation": _seconds_of_unit,
    "bonuses": lambda run: run["seconds"],
    "toy.json": lambda content: content["seconds"],
    "growth.json": lambda content: sum(sum(times) for parts in content["seconds"].values() for times in parts.values()),
    "column.json": lambda content: sum(times["all_s"] for times in content["times"].values()),
    "fit.json": lambda content: sum(
        times["fit_s"] + times["set_up_s"]
        for ways in content["times"].values()
        for way, times in ways.items()
        if way != "floor"
    ),
}
"""Seconds of work that a result file records. The other files record rates or figures only."""


def shown_time(seconds: float) -> str:
    """Return seconds in the largest fitting unit."""
    units = (("h", 3600), ("min", 60), ("s", 1))
    unit, length = next(((unit, length) for unit, length in units if seconds >= 1.5 * length), units[-1])
    return f"{seconds / length:.1f} {unit}"


Writer = Callable[[], list[str]]
PAGES: dict[str, tuple[Writer, ...]] = {
    "README.md": (shift_headline,),
    "docs/results/index.md": (provenance, data),
    "docs/results/detection.md": (
        shift_headline, shift_auroc, shift_other_sets, shift_differences, shift_units, shift_sets,
        detectors, default_score, ablation, toy,
    ),
    "docs/results/exploration.md": (bonuses, agent, stages, environments),
    "docs/results/cost.md": (scoring, on_model, shift_fit, fit, column, growth),
    "docs/limits.md": (small,),
    "docs/guides/monitor.md": (monitor_level, monitor_delay),
    "docs/which-method.md": (risk, regression),
    "docs/reproduce.md": (reproduce,),
}  # fmt: skip
FOLDS = {
    "shift_auroc": "AUROC of all methods, with spreads and gaps to the paper",
    "shift_other_sets": "AUROC over the three other sets alone",
    "shift_differences": "CSD-Aug on the classifier less each rival",
    "shift_units": "Seeds that were run",
    "stages": "Fused network stages",
}  # tables in a box that opens, and its title


def filled(text: str, name: str, tables: Iterable[Writer]) -> str:
    """The text with every table in its place, between two comments."""
    for table in tables:
        begin, end = f"<!-- {table.__name__} -->\n", f"\n<!-- end of {table.__name__} -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        assert pattern.search(text), f"{name} has no place for the table {table.__name__}"
        title, rows = FOLDS.get(table.__name__), table()
        new = "\n".join(folded(title, rows) if title else rows)
        text = pattern.sub(lambda match, new=new: match[1] + new + match[2], text)
    return text


def main() -> None:
    for name, tables in PAGES.items():
        path = ROOT / name
        path.write_text(filled(path.read_text("utf-8"), name, tables), "utf-8")


if __name__ == "__main__":
    main()
