"""Cohort tables, the paper's tables, joins with features, splits by case."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xmil
from tests.data import producers as p
from xmil.data import join_features, split_folds, split_fractions

TABLE = "slide_id,case_id,label,time,event\n001,a,HPV+,10,1\n002,a,HPV-,,\n003,b,HPV+,3.5,0\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_cells_stay_as_written(tmp_path: Path) -> None:
    cohort = xmil.read_cohort(write(tmp_path / "c.csv", TABLE))
    assert cohort.slides == ["001", "002", "003"]  # not 1, 2, 3
    assert cohort.classes("label") == ["HPV+", "HPV-"]
    assert cohort.labels("label").tolist() == [0, 1, 0]
    np.testing.assert_array_equal(cohort.numbers("time"), [10, np.nan, 3.5])
    times, events = cohort.survival("time", "event")
    assert events.tolist() == [True, False, False]
    assert times[2] == 3.5


@pytest.mark.parametrize(
    "text", ["\ufeff" + TABLE, TABLE.replace(",", ";"), TABLE.replace(",", "\t"), TABLE + "\n,,,,\n"]
)
def test_dialects(tmp_path: Path, text: str) -> None:
    assert xmil.read_cohort(write(tmp_path / "c.csv", text)).slides == ["001", "002", "003"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    cohort = xmil.read_cohort(write(tmp_path / "c.csv", TABLE)).with_column("split", ["train", None, "test"])
    cohort.save(tmp_path / f"out.{suffix}")
    again = xmil.read_cohort(tmp_path / f"out.{suffix}")
    assert list(again.columns) == list(cohort.columns)
    assert again.slides == cohort.slides
    assert again.column("split") == ("train", None, "test")
    np.testing.assert_array_equal(again.numbers("time"), cohort.numbers("time"))


def test_whole_number_labels_are_class_indices() -> None:
    cohort = xmil.Cohort({"slide_id": tuple("abcd"), "label": ("2", "0", None, "2.0")})
    assert cohort.classes("label") == ["0", "1", "2"]
    assert cohort.labels("label").tolist() == [2, 0, -1, 2]


@pytest.mark.parametrize(
    ("cells", "classes", "labels"),
    [
        (("1560670911513928.0", "3"), ["3", "1560670911513928"], [1, 0]),
        (("01", "a"), ["01", "a"], [0, 1]),
        (("-1.0", "-1", "1"), ["-1", "1"], [0, 0, 1]),
    ],
)
def test_every_spelling_of_a_number_is_a_class(
    cells: tuple[str, ...], classes: list[str], labels: list[int]
) -> None:
    cohort = xmil.Cohort({"slide_id": tuple("abc"[: len(cells)]), "label": cells})
    assert cohort.classes("label") == classes
    assert cohort.labels("label").tolist() == labels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "Found: a, b. Name it with `slide_column=`"),
        ("slide_id,label\ns1,0\ns1,1\n", "several for s1"),
        ("slide_id\ns1\ns1\ns2\ns2\n", "several for s1, s2"),
        ("slide_id,label\n,0\n", "row 2 has no slide_id"),
        ("slide_id,label\ns1\n", "row 2 has 1 cells"),
        ("slide_id,slide_id\ns1,s2\n", "repeats slide_id"),
        ("case_id,label,subset\nc1,0,train\n", "slide_column=.*A split by case.*metadata="),
        ("\n\n", "the table is empty"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "c.csv", text)
    with pytest.raises(xmil.XmilError, match=message) as caught:
        xmil.read_cohort(path)
    assert str(path) in str(caught.value)


def test_unknown_column_suggests(tmp_path: Path) -> None:
    with pytest.raises(xmil.XmilError, match="Did you mean 'label'"):
        xmil.read_cohort(write(tmp_path / "c.csv", TABLE)).labels("labels")


def test_other_names_for_the_columns(tmp_path: Path) -> None:
    cohort = xmil.read_cohort(write(tmp_path / "c.csv", "FILENAME,PATIENT,y\ns1,p1,0\n"))
    assert (cohort.slides, cohort.cases) == (["s1"], ["p1"])
    assert cohort.inferred == ("slide_id from the column 'FILENAME'", "case_id from the column 'PATIENT'")


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    folder = tmp_path / "metadata"
    folder.mkdir()
    write(folder / "case_metadata.csv", ",case_id,age\n0,c1,50\n1,c2,60\n2,c3,70\n")
    write(folder / "slide_metadata.csv", "slide_id,case_id,stain\ns1,c1,HE\ns2,c1,HE\ns3,c2,HE\ns4,c9,HE\n")
    return folder


def test_the_papers_metadata(metadata: Path) -> None:
    cohort = xmil.read_cohort(metadata)
    assert cohort.slides == ["s1", "s2", "s3", "s4"]
    assert cohort.column("age") == ("50", "50", "60", None)


def test_the_papers_split_file(metadata: Path, tmp_path: Path) -> None:
    split = write(
        tmp_path / "split.csv", "case_id,HPV_status,label,subset\nc1,+,1,train\nc2,-,0,test\nc3,-,0,val\n"
    )
    cohort = xmil.read_cohort(split, metadata=metadata)
    assert cohort.slides == ["s1", "s2", "s3"]
    assert cohort.column("split") == ("train", "train", "test")
    assert cohort.labels("label").tolist() == [1, 1, 0]
    assert cohort.subset("train").slides == ["s1", "s2"]


def test_two_sources(metadata: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other / "slide_metadata.csv", "slide_id,case_id\nt1,d1\n")
    split = write(tmp_path / "split.csv", "case_id,label,subset\nc1,1,0\nd1,0,1\n")
    cohort = xmil.read_cohort(split, metadata=[metadata, other])
    assert cohort.slides == ["s1", "s2", "t1"]
    assert cohort.column("source_id") == ("0", "0", "1")
    assert cohort.column("split") == ("0", "0", "1")


def test_join_reports_what_did_not_match(tmp_path: Path) -> None:
    for name in ("001", "003", "stray"):
        p.plain(tmp_path, name)
    p.plain(tmp_path, "003", container="pt")
    (tmp_path / "out.npy").symlink_to("/dev/null")
    cohort = xmil.Cohort({"slide_id": ("001.svs", "002", "003")})
    joined, report = join_features(cohort, tmp_path)
    assert joined.slides == ["001.svs", "003"]
    assert joined.column("path")[0] == str(tmp_path / "001.npy")
    assert (report.matched, report.without_features, report.without_row) == (2, ("002",), ("stray.npy",))
    assert (report.doubled, report.not_followed) == (("003",), ("out.npy",))
    assert "1 slides without features: 002" in str(report)


def test_join_by_path_column(tmp_path: Path) -> None:
    p.plain(tmp_path, "x")
    joined, _ = join_features(xmil.Cohort({"slide_id": ("s1", "s2"), "path": ("x.npy", "y.npy")}), tmp_path)
    assert joined.slides == ["s1"]


def test_join_takes_folders_that_are_bags(tmp_path: Path) -> None:
    p.paper(tmp_path, "s1", container="folder")
    joined, _ = join_features(xmil.Cohort({"slide_id": ("s1",)}), tmp_path / "features")
    assert len(xmil.read_bag(joined.column("path")[0] or "")) == p.N


def test_join_without_any_match_is_an_error(tmp_path: Path) -> None:
    p.plain(tmp_path, "x")
    with pytest.raises(xmil.XmilError, match="no feature file has the name of a slide"):
        join_features(xmil.Cohort({"slide_id": ("s1",)}), tmp_path)


@st.composite
def cohorts(draw: st.DrawFn) -> xmil.Cohort:
    cases = draw(st.lists(st.integers(0, 30), min_size=4, max_size=60))
    labels = {case: draw(st.sampled_from("abc")) for case in cases}
    slides = tuple(f"s{i}" for i in range(len(cases)))
    return xmil.Cohort(
        {
            "slide_id": slides,
            "case_id": tuple(map(str, cases)),
            "label": tuple(labels[case] for case in cases),
        }
    )


def case_counts(cohort: xmil.Cohort, column: str) -> dict[str, Counter[str]]:
    """Cases of each label on each side."""
    seen = set(zip(cohort.cases, cohort.column("label"), cohort.column(column), strict=True))
    counts: dict[str, Counter[str]] = {}
    for _, label, side in seen:
        counts.setdefault(label, Counter())[side] += 1
    return counts


@settings(max_examples=200, deadline=None)
@given(cohort=cohorts(), folds=st.integers(2, 5), seed=st.integers(0, 9))
def test_folds_never_part_a_case_and_are_even(cohort: xmil.Cohort, folds: int, seed: int) -> None:
    if len(set(cohort.cases)) < folds:
        with pytest.raises(xmil.XmilError, match="the number of cases"):
            split_folds(cohort, folds, stratify="label", seed=seed)
        return
    done = split_folds(cohort, folds, stratify="label", seed=seed)
    assert done.leaking_cases("fold") == []
    assert set(done.column("fold")) == {str(i) for i in range(folds)}
    for counts in case_counts(done, "fold").values():
        sizes = [counts[str(i)] for i in range(folds)]
        assert max(sizes) - min(sizes) <= 1
    assert done.column("fold") == split_folds(cohort, folds, stratify="label", seed=seed).column("fold")


@settings(max_examples=200, deadline=None)
@given(cohort=cohorts(), seed=st.integers(0, 9))
def test_fractions_never_part_a_case_and_keep_the_shares(cohort: xmil.Cohort, seed: int) -> None:
    shares = {"train": 0.6, "test": 0.4}
    try:
        done = split_fractions(cohort, shares, stratify="label", seed=seed)
    except xmil.XmilError as error:
        assert "Too few cases" in str(error)  # noqa: PT017
        return
    assert done.leaking_cases() == []
    for label, counts in case_counts(done, "split").items():
        cases = sum(counts.values())
        for side, share in shares.items():
            assert abs(counts[side] - share * cases) < 2, (label, counts)
    total = sum(case_counts(done, "split").values(), Counter())
    assert abs(total["train"] - 0.6 * sum(total.values())) <= 1


def test_splits_differ_by_seed_and_do_not_depend_on_row_order() -> None:
    cohort = xmil.Cohort({"slide_id": tuple(f"s{i}" for i in range(40))})
    first, second = split_folds(cohort, 4, seed=0), split_folds(cohort, 4, seed=1)
    assert first.column("fold") != second.column("fold")
    turned = split_folds(cohort.take(reversed(range(40))), 4, seed=0)
    assert turned.column("fold") == first.column("fold")[::-1]


def test_slides_without_a_label_are_left_out_of_a_split(caplog: pytest.LogCaptureFixture) -> None:
    cohort = xmil.Cohort({"slide_id": tuple("abcd"), "label": ("0", None, "1", "1")})
    done = split_folds(cohort, 2, stratify="label")
    assert done.column("fold")[1] is None
    assert "1 cases have no label" in caplog.text


def test_a_leaking_split_is_refused() -> None:
    cohort = xmil.Cohort({"slide_id": ("a", "b"), "case_id": ("1", "1"), "split": ("train", "test")})
    with pytest.raises(
        xmil.XmilError, match=r"1 cases lie in two splits of 'split' \(1\); split again by case"
    ):
        cohort.subset("train")


@pytest.mark.parametrize(
    "shares", [{"train": 1.0}, {"train": 0.5, "test": 0.6}, {"train": -1.0, "test": 2.0}]
)
def test_bad_shares(shares: dict[str, float]) -> None:
    with pytest.raises(xmil.XmilError, match="two or more positive shares that sum to 1"):
        split_fractions(xmil.Cohort({"slide_id": tuple("abcd")}), shares)


@pytest.mark.parametrize("name", ["Slide_ID", "SlideName", "image", "Image ID", "FileName", "WSI"])
def test_columns_are_found_without_case_and_by_synonym(name: str, tmp_path: Path) -> None:
    table = write(tmp_path / "c.csv", f"{name},Patient_ID,split,label\nslides/a.svs,p,train,1\n")
    cohort = xmil.read_cohort(table)
    assert (cohort.slides, cohort.cases) == (["a.svs"], ["p"])
    assert cohort.inferred[0] == f"slide_id from the column {name!r}"


def test_the_column_of_slides_can_be_named(tmp_path: Path) -> None:
    table = write(tmp_path / "c.csv", "accession,case_id,split,image\nx1,p,train,z\n")
    assert xmil.read_cohort(table, slide_column="accession").slides == ["x1"]
    assert xmil.read_cohort(table).slides == ["z"]
    with pytest.raises(xmil.XmilError, match="Unknown column 'acession'"):
        xmil.read_cohort(table, slide_column="acession")
    table = write(tmp_path / "d.csv", "accession,case_id,split\nx1,p,train\n")
    with pytest.raises(xmil.XmilError, match="slide_column="):
        xmil.read_cohort(table)


@pytest.mark.parametrize("column", ["Patient", "case_id", "CaseID", "subset", "split", "Image"])
def test_the_column_of_slides_may_have_a_name_for_another_column(tmp_path: Path, column: str) -> None:
    table = write(tmp_path / "c.csv", f"{column},label\np1,0\np2,1\n")
    cohort = xmil.read_cohort(table, slide_column=column)
    assert cohort.slides == ["p1", "p2"]
    assert cohort.cases == ["p1", "p2"]  # each slide is a case of its own
    assert dict(cohort.names) == {"slide_id": column}


def test_another_column_of_cases_is_used_if_the_first_names_slides(tmp_path: Path) -> None:
    table = write(tmp_path / "c.csv", "Patient,subject,label\np1,a,0\np2,a,1\n")
    cohort = xmil.read_cohort(table, slide_column="Patient")
    assert (cohort.slides, cohort.cases) == (["p1", "p2"], ["a", "a"])
