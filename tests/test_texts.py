"""Texts as data: lists, files and columns; bytes in batches and in files; bad input."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from test_pretrained import TEXTS, save_bert

from onefold import CSD, KNN, cli, kernels, load
from onefold.core import storage
from onefold.core.batches import concatenate
from onefold.data import read_texts
from onefold.errors import FileError, InputError
from onefold.inputs import Picture, Table, Text, TextSource, form_of, open_source
from onefold.inputs.reader import Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.text import LONGEST_TEXT, decode_texts, pack_texts, unpack_texts
from onefold.report.score_page import PageInputs

FEW = ["a cat", "über größe 猫", "the dog sat on the mat"]


def texts_in(x: Any, column: str | None = None) -> list[str]:
    source = open_source(x, form=Text(column))
    assert isinstance(source, TextSource)
    return [text for batch in source.batches(2) for text in decode_texts(batch)]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_bert(tmp_path / "bert")


# ---- sources


@pytest.mark.parametrize(
    "x",
    [FEW, tuple(FEW), np.array(FEW), np.array(FEW, object), pd.Series(FEW), pd.DataFrame({"t": FEW}),
     pa.table({"t": FEW}), pa.chunked_array([FEW])],
)  # fmt: skip
def test_texts_in_memory(x: Any) -> None:
    assert texts_in(x) == FEW


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "parquet", "strings.jsonl"])
def test_texts_of_files(tmp_path: Path, suffix: str) -> None:
    path, long = tmp_path / f"x.{suffix}", [*FEW, "word " * 100]
    frame = pd.DataFrame({"id": range(4), "body": long})
    match suffix:
        case "txt":
            path.write_text("\n".join(long) + "\n", encoding="utf-8")
        case "jsonl":
            path.write_text("\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(long)) + "\n\n")
        case "strings.jsonl":
            path.write_text("\n".join(map(json.dumps, long)))
        case "parquet":
            parquet.write_table(pa.Table.from_pandas(frame), path)
        case _:
            frame.to_csv(path, index=False, sep="\t" if suffix == "tsv" else ",")
    column = None if suffix in ("txt", "strings.jsonl") else "body"
    assert texts_in(str(path), column) == [*FEW, "word " * 100], "texts of a column are not shortened"
    assert len(read_texts(path, column)) == 4
    if column is not None:
        with pytest.raises(InputError, match=r"no column of it is named. .*'body'"):
            read_texts(path)
        with pytest.raises(InputError, match="no column 'text'"):
            read_texts(path, "text")
        with pytest.raises(InputError, match="column 'id' holds numbers"):
            read_texts(path, "id")


def test_long_texts_are_cut_at_whole_characters() -> None:
    source = TextSource(["猫" * LONGEST_TEXT, "a\0b"])
    first, second = decode_texts(source.take(np.array([0, 1])))
    assert first == "猫" * (LONGEST_TEXT // 3)
    assert second == "a b"


@pytest.mark.parametrize(
    ("texts", "match"),
    [(["a", "", "b"], r"1 text is empty \(row 2\)"), (["a", " ", "\n"], r"2 texts are empty \(row 2\)"),
     (["a", None], "row 2 is missing"), (["a", 3], "row 2 is a int"), (["a", float("nan")], "row 2 is missing")],
)  # fmt: skip
def test_empty_and_missing_texts_are_refused(texts: list[Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        open_source(texts)


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"{}\n[1]", "line 2: neither"), (b'{"a": "b"}\n{', "line 2: not JSON"), (b'"a"\n{"b": "c"}', "mixes"),
     (b"\xff\xfe", "not UTF-8"), (b'"a\0"', "NUL byte"), (b"", "no texts"), (b"[" * 10**5, "not JSON")],
)  # fmt: skip
def test_json_lines_that_cannot_be_used(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=match):
        open_source(path, form=Text())
    with pytest.raises(InputError, match="need an encoder"):
        open_source(path)


def test_other_data_is_refused(tmp_path: Path) -> None:
    for x, form, match in [
        (np.zeros((3, 2)), Text(), "not texts, but the detector is fitted on texts"),
        (FEW, Picture(8, 8, 3), "texts, but the detector is fitted on images"),
        (FEW, Table.infer([{"a": [1, 2]}]), "texts, but the detector is fitted on a table"),
        (str(tmp_path / "none"), Text(), "Pass texts as a list"),
    ]:
        with pytest.raises(InputError, match=match):
            open_source(x, form=form)
    for detector in (CSD(), KNN()):
        with pytest.raises(InputError, match="texts need an encoder"):
            detector.fit(FEW)
    with pytest.raises(InputError, match="texts need an encoder"):
        KNN(kernels.from_model(torch.nn.Linear(2, 2))).fit(FEW)


# ---- batches and files


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")).filter(str.strip), min_size=1))
def test_packing_texts_loses_nothing(texts: list[str]) -> None:
    batch = TextSource(texts).take(np.arange(len(texts)))
    assert torch.equal(unpack_texts(*pack_texts(batch)), batch)
    assert decode_texts(batch) == texts
    joined = concatenate([TextSource([text]).take(np.array([0])) for text in texts])
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined, batch), "batches of different lengths are padded"


@pytest.mark.parametrize(
    ("content", "lengths"),
    [(torch.ones(3, dtype=torch.uint8), torch.tensor([2])), (torch.ones(3), torch.tensor([3])),
     (torch.ones(0, dtype=torch.uint8), torch.tensor([0])), (torch.ones(1, dtype=torch.uint8), torch.tensor([2**40])),
     (torch.zeros(2, dtype=torch.uint8), torch.tensor([2])), (torch.ones(3, dtype=torch.uint8), torch.tensor([4, -1]))],
)  # fmt: skip
def test_impossible_texts_of_a_file_are_refused(content: torch.Tensor, lengths: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="texts:"):
        unpack_texts(content, lengths)


def test_samples_are_removed_from_a_reservoir_whatever_their_padding() -> None:
    reservoir = Reservoir(10, 0).add(TextSource(FEW).take(np.arange(3)))
    reservoir.remove(TextSource(FEW[:1]).take(np.array([0])))
    assert isinstance(reservoir.samples, torch.Tensor)
    assert decode_texts(reservoir.samples) == FEW[1:]


def test_a_detector_remembers_texts_and_their_column(bert: Path, tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": range(60), "body": TEXTS})
    detector = KNN(kernels.from_pretrained(bert)).fit(read_texts(frame, "body")).calibrate(TEXTS[:30], 0.1)
    assert form_of(open_source(frame, form=detector.reader.form)) == Text("body")
    path = tmp_path / "d.onefold"
    detector.save(path)
    loaded = load(path)
    assert np.array_equal(loaded.score(frame), detector.score(TEXTS))
    assert isinstance(loaded.remembered, torch.Tensor)
    assert decode_texts(loaded.remembered) == TEXTS
    assert Reader.from_json(detector.reader.to_json()) == detector.reader
    page = PageInputs(loaded, 2)
    page.add(next(detector.state.batches(FEW)))
    assert page.fields()["values"] == [[text] for text in FEW]
    tensors, header = storage.load(path, "detector")
    assert tensors["reservoir.samples.x.bytes"].numel() == sum(map(len, TEXTS)), "texts are stored without padding"
    tensors["reservoir.samples.x.lengths"][0] += 1
    storage.save(path, "detector", tensors, header)
    with pytest.raises(FileError, match="damaged"):
        load(path)


# ---- the command line


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_fit_and_score_texts(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, new, out = tmp_path / "x.jsonl", tmp_path / "new.csv", tmp_path / "d.onefold"
    data.write_text("\n".join(json.dumps({"n": i, "body": text}) for i, text in enumerate(TEXTS * 3)))
    pd.DataFrame({"n": [1, 2], "body": ["the cat sat", "big red house"]}).to_csv(new, index=False)
    assert run("fit", data, "-o", out, "--model", bert, "--text", "body") == 0
    printed = capsys.readouterr().out
    assert "method local-gp: an encoder (pretrained on other data)" in printed
    assert "16 numbers, mean of last_hidden_state under attention_mask" in printed
    stored = out.with_name("d.onefold.embeddings.safetensors")
    before = stored.read_bytes()
    first = load(out).score(["the cat sat"])
    assert run("fit", data, "-o", out, "--model", bert, "--text", "body") == 0
    assert stored.read_bytes() == before, "a second fit computes nothing"
    assert load(out).score(["the cat sat"]) == pytest.approx(first, abs=1e-6)
    assert run("score", out, new, "-o", tmp_path / "s.csv", "--report", tmp_path / "s.html") == 0
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 3
    assert "big red house" in (tmp_path / "s.html").read_text()
    assert run("score", out, data, "-o", tmp_path / "s.csv", "--model", bert) == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [(("--model", "BERT", "--text", "id"), "--text: .*column 'id' holds numbers"),
     (("--model", "BERT"), "--text: .*no column of it is named"),
     (("--text", "body"), "--text: texts need an encoder. Name one with --model"),
     ((), "x.jsonl: texts need an encoder"),
     (("--model", "unknown"), "--model: 'unknown' is not a known encoder"),
     (("--model", "BERT", "--layer", "x"), "--layer: a layer belongs to a .pt2 file")],
)  # fmt: skip
def test_wrong_options_fail_on_one_line(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], match: str
) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text("\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)))
    chosen = [str(bert) if option == "BERT" else option for option in options]
    assert run("fit", data, "-o", tmp_path / "d.onefold", *chosen) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert re.search(match, error[0])
