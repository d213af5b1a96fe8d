"""Every format and folder that published data comes in, and every way in which it can be wrong."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from published_files import gsm8k_rows, hellaswag_row, read, save_to_disk, write_lines, write_parquet, write_stream

from megappo.cli import main
from megappo.data.prompts import DataError
from megappo.data.published.files import find_files
from megappo.data.published.rows import read_rows
from megappo.data.published.write import write_dataset

ROWS = gsm8k_rows(10)
COLUMNS = ("question", "answer")


def write_whole_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=2))
    return path


def write_arrow_file(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def write_marked(path: Path) -> Path:
    """With a byte-order mark, blank lines and Windows line ends."""
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row).encode() for row in ROWS) + b"\r\n")
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.parquet", lambda path: write_parquet(path, ROWS)),
        ("x.jsonl", lambda path: write_lines(path, ROWS)),
        ("x.jsonl.gz", lambda path: write_lines(path, ROWS)),
        ("x.json", lambda path: write_lines(path, ROWS)),
        ("x.json", write_whole_json),
        ("x.jsonl", write_marked),
        ("x.arrow", lambda path: write_stream(path, ROWS)),
        ("x.arrow", write_arrow_file),
    ],
)
def test_every_format_reads_the_same(tmp_path: Path, name: str, write) -> None:  # type: ignore[no-untyped-def]
    assert list(read_rows(write(tmp_path / name), COLUMNS, ("extra",))) == [{**row, "extra": None} for row in ROWS]


def test_a_saved_dataset_dict(tmp_path: Path) -> None:
    src = tmp_path / "saved"
    save_to_disk(src / "train", "train", ROWS[:4], ROWS[4:7])
    save_to_disk(src / "test", "test", ROWS[7:])
    (src / "train/cache-0123.arrow").write_bytes(b"not listed in state.json")
    (src / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_dataset("gsm8k", src, tmp_path / "out")
    assert [row["extra_info"]["question"] for row in read(tmp_path / "out/train.parquet")] == [
        row["question"] for row in ROWS[:7]
    ]
    assert len(read(tmp_path / "out/validation.parquet")) == 3
    (src / "train/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"train: lacks data-00001-of-00002.arrow, which state.json names"):
        write_dataset("gsm8k", src, tmp_path / "out")
    (src / "test/state.json").unlink()
    with pytest.raises(DataError, match=r"saved: lacks split test, which dataset_dict.json names"):
        write_dataset("gsm8k", src, tmp_path / "out")


def test_a_saved_single_dataset(tmp_path: Path) -> None:
    src = save_to_disk(tmp_path / "mine", "test", ROWS)
    written = write_dataset("gsm8k", src, tmp_path / "out", validation=2)
    assert list(written.rows.values()) == [8, 2]
    assert written.notes == (f"{src}: has a test split only, which is divided",)
    state = json.loads((src / "state.json").read_text())
    (src / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataError, match="flatten_indices"):
        find_files(src)


def test_splits_by_file_and_folder_names(tmp_path: Path) -> None:
    names = [
        "data/train-00001-of-00002.parquet",
        "data/train-00000-of-00002.parquet",
        "data/validation-00000-of-00001.parquet",
        "test/part.parquet",
        "more.parquet",
        ".git/train.parquet",
    ]
    for name in names:
        write_parquet(tmp_path / name, ROWS)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("train")
    source = find_files(tmp_path)
    assert source.splits == {
        "train": (tmp_path / names[1], tmp_path / names[0]),
        "validation": (tmp_path / names[2],),
        "test": (tmp_path / names[3],),
    }
    assert source.notes == (f"left out {tmp_path / 'more.parquet'}: no name or folder tells their split",)


def test_what_is_named_itself_is_used(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "socratic/train-00000-of-00001.parquet", ROWS)
    for src in (path, path.parent, tmp_path):
        assert find_files(src, ("socratic",)).splits == {"train": (path,)}
        assert find_files(src, ("socratic",)).notes == ()


def test_the_same_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", ROWS)
    write_lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"split train is there more than once, as .*train.parquet and .*train.jsonl"):
        find_files(tmp_path)


def test_validation_may_be_drawn_where_there_is_a_test_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "src/train.jsonl", ROWS)
    write_lines(tmp_path / "src/test.jsonl", gsm8k_rows(3, start=50))
    written = write_dataset("gsm8k", tmp_path / "src", tmp_path / "out", validation=4)
    assert list(written.rows.values()) == [6, 4]
    assert written.notes == ("test split: not used",)
    assert {row["extra_info"]["split"] for row in read(tmp_path / "out/validation.parquet")} == {"train"}


def cut(path: Path, part: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    return path


def test_damaged_files_are_named(tmp_path: Path) -> None:
    def refused(path: Path, *words: str) -> None:
        with pytest.raises(DataError) as error:
            list(read_rows(path, COLUMNS))
        for word in (str(path), *words):
            assert word in str(error.value)

    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    refused(file("empty.jsonl", b""), "is empty (0 bytes)")
    refused(file("empty.parquet", b""), "is empty (0 bytes)")
    refused(file("blank.jsonl", b"\n\n"), "has no rows")
    refused(file("list.json", b"[]"), "has no rows")
    refused(file("empty.jsonl.gz", gzip.compress(b"")), "has no rows")
    refused(write_parquet(tmp_path / "none.parquet", []), "has no column question")
    pq.write_table(pa.table({"question": pa.array([], pa.string()), "answer": []}), tmp_path / "rows.parquet")
    refused(tmp_path / "rows.parquet", "has no rows")
    refused(file("pointer.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull")
    refused(file("page.jsonl", b"<!DOCTYPE html>\n<html></html>"), "after 0 rows", "no JSON")
    refused(file("number.jsonl", b'{"question": "", "answer": ""}\n3\n'), "line 2", "must be a JSON object")
    refused(file("latin.jsonl", b'{"question": "\xe9", "answer": ""}\n'), "truncated or damaged", "utf-8")
    refused(cut(write_parquet(tmp_path / "cut.parquet", ROWS), 0.9), "truncated or damaged after 0 rows")
    refused(cut(write_lines(tmp_path / "cut.jsonl", ROWS), 0.95), "after 9 rows", "line 10", "truncated")
    refused(cut(write_lines(tmp_path / "cut.jsonl.gz", gsm8k_rows(2000)), 0.5), "truncated or damaged after", "rows")
    refused(cut(write_stream(tmp_path / "cut.arrow", ROWS), 0.8), "truncated or damaged")
    whole = write_stream(tmp_path / "mark.arrow", ROWS).read_bytes()
    refused(file("mark.arrow", whole[:-8]), "its end mark is missing")
    refused(tmp_path / "absent.jsonl", "cannot be read: No such file")
    refused(file("other.arrow", b"no arrow at all, but long enough" + b"\xff\xff\xff\xff\0\0\0\0"), "damaged")


def test_a_wrong_schema_names_file_columns_and_fix(tmp_path: Path) -> None:
    wrong = [{"question": "1?", "solution": "2"}]
    for path in (
        write_parquet(tmp_path / "a.parquet", wrong),
        write_lines(tmp_path / "b.jsonl", wrong),
        write_stream(tmp_path / "c.arrow", wrong),
    ):
        with pytest.raises(DataError) as error:
            write_dataset("gsm8k", path, tmp_path / "out")
        assert str(error.value) == (
            f"{path}: has no column answer; it has question, solution; it needs question, answer: "
            "give the data set's own files, or rename the columns"
        )
    nothing = write_lines(tmp_path / "d.jsonl", [{"text": "1"}])
    with pytest.raises(DataError) as error:
        write_dataset("gsm8k", nothing, tmp_path / "out")
    assert str(error.value) == (
        f"{nothing}: has no column question, answer; it has text; give the data set's own files, or rename the columns"
    )
    write_dataset("gsm8k", write_lines(tmp_path / "x.jsonl", ROWS), tmp_path / "out", validation=1)
    with pytest.raises(DataError, match=r"columns of prompt files already: name it in data.train"):
        write_dataset("gsm8k", tmp_path / "out/train.parquet", tmp_path / "again")


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/notes.txt").write_text("x")
    for src, message in (
        ("nowhere", "nowhere: no such file or folder"),
        ("src", "has no data files .*; it has notes.txt"),
        ("src/notes.txt", "is no data file by its name"),
    ):
        with pytest.raises(DataError, match=message):
            write_dataset("gsm8k", tmp_path / src, tmp_path / "out")
    train = write_parquet(tmp_path / "src/train.parquet", ROWS)
    with pytest.raises(ValueError, match="in the source folder"):
        write_dataset("gsm8k", tmp_path / "src", tmp_path / "src/out")
    with pytest.raises(ValueError, match="would be overwritten"):
        write_dataset("gsm8k", train, tmp_path / "src")
    with pytest.raises(ValueError, match="--validation: 0: give at least 1"):
        write_dataset("gsm8k", train, tmp_path / "out", validation=0)
    with pytest.raises(DataError, match=rf"^{train}: 50 questions wanted"):  # the file, not its folder
        write_dataset("gsm8k", train, tmp_path / "out", validation=50)
    write_parquet(tmp_path / "two/test.parquet", ROWS)
    write_parquet(tmp_path / "two/validation.parquet", ROWS)
    with pytest.raises(DataError, match="has no train split, but test, validation"):
        write_dataset("gsm8k", tmp_path / "two", tmp_path / "out")


def test_a_failure_leaves_the_old_files_alone(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", ROWS)
    write_dataset("gsm8k", path, tmp_path / "out", validation=1)
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with path.open("a") as file:
        file.write('{"question": ')
    with pytest.raises(DataError, match="after 10 rows"):
        write_dataset("gsm8k", path, tmp_path / "out", validation=1)
    assert {file: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [hellaswag_row(ctx_b=f"he {i}") for i in range(5)]
    path = write_lines(tmp_path / "hellaswag_train.jsonl", [*rows, hellaswag_row(label="")])
    out = tmp_path / "out"
    arguments = ["data", "hellaswag", str(path), str(out), "--validation", "2", "--seed", "3", "--instruction", "So?"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}/train.parquet: 3 rows\n{out}/validation.parquet: 2 rows\n"
    assert printed.err.startswith("warning: train split: 1 of 6 rows left out: no label")
    assert read(out / "train.parquet")[0]["prompt"][0]["content"].endswith("D. , the man stops.\nSo?")
    assert main(["data", "gsm8k", str(path), str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: has no column question, answer; it has ind, ")
    with pytest.raises(SystemExit, match="0"):
        main(["data", "math", "--help"])
    assert "within \\boxed{}" in " ".join(capsys.readouterr().out.split())


MEASURE = """
import resource, sys
from megappo.data.published.write import write_dataset
write_dataset("gsm8k", sys.argv[1], sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}.jsonl"
        line = json.dumps({"question": "%09d" + "?" * 2000, "answer": "." * 2000 + "#### 5"}) + "\n"
        with path.open("w") as file:
            file.writelines(line % i for i in range(rows))
        command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "out")]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # KiB

    few, many = peak(3_000), peak(15_000)  # 12 and 60 MB
    assert many - few < 30_000
