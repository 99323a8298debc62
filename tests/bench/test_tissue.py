"""Tissue: class-labelled images by patient, colon nuclei, and lesions of CAMELYON16."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL", reason="tissue images need pillow")

import h5py
from PIL import Image

from tests.bench.runs import tiny_plan
from xmil.bench import (
    SPLITS,
    SUITES,
    Tissue,
    Unit,
    camelyon_problem,
    colon_problems,
    cut,
    evidence_of,
    folds,
    grade_lesions,
    label_of,
    lesions_of,
    read_asap,
    read_tissue,
    statistics,
    tissue_problems,
)
from xmil.core.errors import FileError, InputError, UnknownNameError

CLASSES = ("LYM", "STR", "TUM")


def drawn(n_patients=8, each=3, seed=0):
    rng = np.random.default_rng(seed)
    rows = [(c, f"P{p}") for p in range(n_patients) for c in CLASSES for _ in range(each)]
    x = rng.normal(size=(len(rows), 5)).astype(np.float32)
    classes, patients = (np.array([row[k] for row in rows]) for k in (0, 1))
    return Tissue("drawn", x, classes, patients)


def problems(tissue, **changes):
    asked = {"positive": "TUM", "against": "LYM", "sizes": (20, 10, 12), "seed": 0, **changes}
    return {p.question.name: p for p in tissue_problems(tissue, **asked)}


def test_no_patient_lies_on_two_sides():
    tissue = drawn()
    for seed in range(5):
        pools = tissue.pools(seed)
        sides = [set(tissue.patients[rows]) for rows in pools.values()]
        assert sum(map(len, sides)) == len(set.union(*sides)) == 8
        assert all(set(tissue.classes[rows]) == set(CLASSES) for rows in pools.values())


def test_of_two_cohorts_the_smaller_is_the_test():
    tissue = drawn(n_patients=5)
    tissue.patients[:] = np.where(np.isin(tissue.patients, ["P0", "P1"]), "b", "a")
    pools = tissue.pools(0)
    assert set(tissue.patients[pools["test"]]) == {"b"}
    assert len(pools["train"]) + len(pools["validation"]) == (tissue.patients == "a").sum()
    assert not set(pools["train"]) & set(pools["validation"])
    lacking = drawn(n_patients=5)
    lacking.patients[:] = np.where(lacking.classes == "TUM", "a", "b")
    with pytest.raises(InputError, match="have every class"):
        lacking.pools(0)


def test_bags_hold_images_of_their_side_alone():
    tissue = drawn()
    problem = problems(tissue)["holds"]
    train = tissue.features[tissue.pools(0)["train"]]
    mean, std = train.mean(axis=0), train.std(axis=0)
    for split in SPLITS:
        rows = {tuple(np.round((x - mean) / std, 3)) for x in tissue.features[tissue.pools(0)[split]]}
        (block,) = problem.blocks(split, 0)
        assert len(set(block.cases)) == 1  # images of all patients of the side: one unit
        seen = {tuple(np.round(x, 3)) for x in block.x.flatten(0, 1).numpy()}
        assert seen <= rows


def slow(name, kinds):
    both = "TUM" in kinds and "LYM" in kinds
    support = {
        "holds": [int(k == "TUM") for k in kinds],
        "more": [(k == "TUM") - (k == "LYM") for k in kinds],
        "both": [int(both and k in ("TUM", "LYM")) for k in kinds],
    }[name]
    label = {"holds": "TUM" in kinds, "more": kinds.count("TUM") > kinds.count("LYM"), "both": both}[name]
    return int(label), support


@pytest.mark.parametrize("name", ["holds", "more", "both"])
def test_labels_and_evidence_follow_the_definition(name):
    tissue = drawn()
    (block,) = problems(tissue)[name].blocks("test", 1)
    train = tissue.features[tissue.pools(1)["train"]]
    known = (tissue.features - train.mean(axis=0)) / train.std(axis=0)
    for x, label, evidence in zip(block.x.numpy(), block.labels, block.evidence, strict=True):
        at = np.abs(known[None] - x[:, None]).sum(axis=2).argmin(axis=1)
        expected, support = slow(name, tissue.classes[at].tolist())
        assert label == expected
        np.testing.assert_array_equal(evidence, [[-s for s in support], support])


def test_bags_are_the_same_twice_and_differ_between_repetitions():
    problem = problems(drawn())["more"]
    first, again, other = (problem.blocks("test", r)[0].checksums() for r in (0, 0, 1))
    assert first == again
    assert not set(first) & set(other)


def test_too_few_patients_and_unknown_classes_are_named():
    with pytest.raises(InputError, match="has only one patient"):
        drawn(n_patients=1).pools(0)
    lonely = drawn()
    lonely.classes[:] = np.where(lonely.patients == "P0", lonely.classes, "STR")
    with pytest.raises(InputError, match="no split of the 8 patients"):
        lonely.pools(0)
    with pytest.raises(UnknownNameError, match="Did you mean 'TUM'"):
        problems(drawn(), positive="TUMM")


def write_images(folder, names):
    rng = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, size=(12, 12, 3), dtype=np.uint8)).save(path)


def test_a_folder_of_class_folders(tmp_path):
    write_images(tmp_path, [f"{c}/{i}_HE-0{p}_{c}.png" for c in CLASSES for p in (1, 2) for i in range(2)])
    found = read_tissue(tmp_path, patient=r"HE-(\d+)")
    assert found.class_names == list(CLASSES)
    assert sorted(set(found.patients)) == ["01", "02"]
    with pytest.raises(InputError, match="unknown patients"):
        read_tissue(tmp_path)
    with pytest.raises(InputError, match="does not match this file name"):
        read_tissue(tmp_path, patient="slide(x)")


def test_folders_of_patients_and_a_table_of_images(tmp_path):
    write_images(tmp_path / "a", [f"{g}/{c}/1.png" for g in ("100K", "7K") for c in CLASSES])
    found = read_tissue(tmp_path / "a", patient="folder")
    assert sorted(set(found.patients)) == ["100K", "7K"]
    write_images(tmp_path / "b", ["1.png", "2.png"])
    (tmp_path / "b" / "images.csv").write_text("path,class,patient\n1.png,TUM,x\n2.png,LYM,y\n")
    listed = read_tissue(tmp_path / "b")
    assert (listed.classes.tolist(), listed.patients.tolist()) == (["TUM", "LYM"], ["x", "y"])
    with Image.open(tmp_path / "b" / "2.png") as image:
        seen = np.asarray(image.convert("RGB").resize((96, 96)))
    np.testing.assert_allclose(listed.features[1], statistics(seen[None])[0], rtol=1e-5)


def test_tables_of_features(tmp_path):
    (tmp_path / "nuclei.csv").write_text("class,patient,f0,f1\nTUM,1,0.5,2\nLYM,2,1.5,3\n")
    table = read_tissue(tmp_path / "nuclei.csv")
    np.testing.assert_array_equal(table.features, [[0.5, 2], [1.5, 3]])
    np.savez(tmp_path / "n.npz", x=table.features, y=table.classes, patient=table.patients)
    np.testing.assert_array_equal(read_tissue(tmp_path / "n.npz").features, table.features)
    (tmp_path / "bad.csv").write_text("class,f0\nTUM,1\n")
    with pytest.raises(FileError, match="needs the column 'patient'"):
        read_tissue(tmp_path / "bad.csv")
    (tmp_path / "worse.csv").write_text("class,patient,f0\nTUM,1,red\n")
    with pytest.raises(FileError, match="must hold numbers"):
        read_tissue(tmp_path / "worse.csv")


def test_statistics_see_what_lies_in_the_middle():
    patch = np.full((1, 48, 48, 3), 255, dtype=np.uint8)
    dark = patch.copy()
    dark[0, 22:26, 22:26] = 40
    moved = np.flatnonzero(statistics(dark)[0] != statistics(patch)[0])
    assert {0, 1, 2} <= set(moved.tolist())  # the innermost ring's means
    assert not set(range(18, 24)) & set(moved.tolist())  # not the outermost ring


def test_colon_labels_evidence_and_folds():
    cells = np.array([0, 0, 1, 1, 1, 3])
    assert (label_of("colon_epithelial", cells), label_of("colon_balance", cells)) == (1, 0)
    assert evidence_of("colon_epithelial", cells)[1].tolist() == [1, 1, 0, 0, 0, 0]
    assert evidence_of("colon_balance", cells).tolist() == [[-1, -1, 1, 1, 1, 0], [1, 1, -1, -1, -1, 0]]
    parts = folds([i % 2 for i in range(23)], seed=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(23))


def test_colon_nuclei_from_the_images(data_dir, monkeypatch):
    monkeypatch.setenv("XMIL_DATA", str(data_dir))
    first, second = SUITES["tissue"].problems(tiny_plan(tasks=("colon_epithelial", "colon_balance")))
    assert (first.name, second.name) == ("colon_epithelial", "colon_balance")
    blocks = first.blocks("test", 0)
    assert sum(len(b) for b in blocks) == len(first.splits[0]["test"]) > 15
    assert {tuple(b.evidence.shape[:2]) for b in blocks} == {(1, 2)}
    sides = [set(first.splits[3][s].tolist()) for s in SPLITS]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 100
    with Image.open(data_dir / "colon" / "img1.jpg") as image:
        pixels = np.asarray(image.convert("RGB"))
    inner = cut(data_dir / "colon" / "img1.jpg", np.array([[100.0, 200.0]]), patch=8)[0]
    np.testing.assert_array_equal(inner, pixels[196:204, 96:104])


def test_cached_colon_features_are_used(data_dir, tmp_path):
    rng = np.random.default_rng(0)
    image, cells = np.repeat(np.arange(20), 3), np.tile([0, 1, 2], 20)
    cells[:30] = 1
    arrays = {"features": rng.normal(size=(60, 4)), "names": np.array([f"i{k}" for k in range(20)])}
    np.savez(tmp_path / "c.npz", image=image, cells=cells, **arrays)
    first, _ = colon_problems(data_dir / "colon", features=tmp_path / "c.npz", runs=2)
    assert [first.bag(i).label for i in range(first.n_bags)] == [0] * 10 + [1] * 10
    np.testing.assert_allclose(first.bag(4).features, arrays["features"][12:15], rtol=1e-5)
    (tmp_path / "d.npz").write_bytes(b"no")
    with pytest.raises(FileError, match=r"d\.npz"):
        colon_problems(data_dir / "colon", features=tmp_path / "d.npz")


def ring(x, y, edge):
    corners = [(x, y), (x + edge, y), (x + edge, y + edge), (x, y + edge)]
    return "".join(f'<Coordinate Order="{i}" X="{a}" Y="{b}"/>' for i, (a, b) in enumerate(corners))


ASAP = (
    '<?xml version="1.0"?><ASAP_Annotations><Annotations>'
    f'<Annotation Name="A" PartOfGroup="Tumor" Type="Polygon"><Coordinates>{ring(0, 0, 200)}</Coordinates>'
    f'</Annotation><Annotation Name="B" PartOfGroup="_1"><Coordinates>{ring(400, 0, 100)}</Coordinates>'
    f'</Annotation><Annotation Name="C" PartOfGroup="_2"><Coordinates>{ring(0, 0, 100)}</Coordinates>'
    '</Annotation><Annotation Name="dot"><Coordinates><Coordinate Order="0" X="1" Y="1"/></Coordinates>'
    "</Annotation></Annotations></ASAP_Annotations>"
)
CORNERS = np.array([[x, y] for y in (0, 100) for x in (0, 100, 200, 300, 400)])


def test_lesions_are_the_outlines_less_what_is_cut_out(tmp_path):
    (tmp_path / "t.xml").write_text(ASAP)
    outlines = read_asap(tmp_path / "t.xml")
    assert [o.tumour for o in outlines] == [True, True, False]
    found = lesions_of(outlines, CORNERS, 100)
    assert found.tolist() == [-1, 0, -1, -1, 1, 0, 0, -1, -1, -1]


@pytest.mark.parametrize(
    "text",
    ["not xml", '<!DOCTYPE x [<!ENTITY a "b">]><x/>', ASAP.replace('X="0"', 'X="left"')],
)
def test_damaged_annotations_are_refused(tmp_path, text):
    (tmp_path / "t.xml").write_text(text)
    with pytest.raises(FileError, match=r"t\.xml"):
        read_asap(tmp_path / "t.xml")


def test_lesion_measures_by_hand():
    lesions = np.array([0, 0, 1, -1, -1, -1, -1])
    perfect = grade_lesions(lesions, (lesions >= 0).astype(float))
    assert perfect == {"lesion_recall": 1.0, "lesion_froc": 1.0}
    assert grade_lesions(lesions, np.zeros(7)) == {"lesion_recall": 0.0, "lesion_froc": 0.25}
    half = grade_lesions(lesions, np.array([9.0, 1, 2, 3, 8, 0, 0]))
    # the top three hold lesion 0; before one error lesion 0, before four both
    assert half["lesion_recall"] == 0.5
    assert half["lesion_froc"] == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    assert np.isnan(grade_lesions(np.full(3, -1), np.ones(3))["lesion_froc"])


def write_camelyon(folder):
    rng = np.random.default_rng(0)
    (folder / "features").mkdir()
    (folder / "annotations").mkdir()
    lines = ["slide_id,split"]
    for i in range(16):
        name = f"{'tumor' if i % 2 else 'normal'}_{i:03d}"
        lines.append(f"{name},{('train', 'train', 'validation', 'test')[i // 4]}")
        x = rng.normal(size=(len(CORNERS), 6)).astype(np.float32)
        if i % 2:
            x[[1, 4, 5, 6], 0] += 4
            (folder / "annotations" / f"{name}.xml").write_text(ASAP)
        with h5py.File(folder / "features" / f"{name}.h5", "w") as file:
            file["features"] = x
            coords = file.create_dataset("coords", data=CORNERS)
            coords.attrs["patch_size_level0"] = 100
    (folder / "slides.csv").write_text("\n".join(lines) + "\n")


def test_camelyon_slides_as_a_problem(tmp_path):
    from tests.bench.runs import referee
    from xmil.bench import Unit

    write_camelyon(tmp_path)
    problem = camelyon_problem(tmp_path)
    blocks = problem.blocks("test", 0)
    assert [int(label) for b in blocks for label in b.labels] == [0, 1, 0, 1]
    plan = tiny_plan(tasks=(), tissue={"source": str(tmp_path)}, training={"epochs": 15, "patience": 15})
    out = tmp_path / "out"
    assert referee(out, "tissue", methods=("oracle", "constant", "lrp"), plan=plan)
    unit = Unit.read(out / "units" / "tissue--camelyon16--attnmil.npz")
    assert unit.facts[0]["auroc"] == 1.0
    assert unit.facts[0]["cases"] == unit.facts[0]["bags"]  # no case_id: slides are their own
    means = {m: np.nanmean(unit.values[0, m], axis=0) for m in ("oracle", "constant", "lrp")}
    assert unit.measures[-2:] == ("lesion_recall", "lesion_froc")
    np.testing.assert_allclose(means["oracle"], 1.0, atol=1e-6)
    assert means["lrp"][-1] > means["constant"][-1]
    assert np.isnan(unit.values[0, "lrp"][0]).all()  # a slide without lesions has nothing to find


def test_a_checkpoint_is_explained_as_it_is(tmp_path):
    import xmil
    from tests.bench.runs import referee

    write_camelyon(tmp_path)
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, attention_dim=4, seed=0)
    xmil.save_model(model, tmp_path / "mine.safetensors")
    plan = tiny_plan(tasks=(), tissue={"source": str(tmp_path)})
    referee(
        tmp_path / "out", "tissue", methods=("lrp",), models=(f"{tmp_path / 'mine.safetensors'}",), plan=plan
    )
    unit = Unit.read(tmp_path / "out" / "units" / "tissue--camelyon16--mine.npz")
    (block,) = camelyon_problem(tmp_path).blocks("test", 0)
    e = xmil.explain(model, block.x[1], target=1)
    slow = grade_lesions(block.lesions[1], e.scores.astype(float))
    np.testing.assert_allclose(unit.values[0, "lrp"][1, -2:], list(slow.values()))
    with pytest.raises(InputError, match="features of width 6"):
        referee(tmp_path / "other", methods=("lrp",), models=(f"{tmp_path / 'mine.safetensors'}",))
