"""Mirrors: the layout of each data set, and what is said when nothing works."""

import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from aidgn.data.download import download, manual_steps
from aidgn.data.download.http import File
from aidgn.data.download.layouts import LAYOUTS
from aidgn.data.download.mirrors import MNIST, SOURCES, VLCS, Mirror, hugging_face
from aidgn.data.loading import load_dataset
from aidgn.data.registry import DATASETS, DatasetInfo
from aidgn.errors import AidgnError
from aidgn.files import StorageError
from tests.data.download.conftest import (
    ARCHIVE,
    ENTRY,
    IMAGES,
    Server,
    contents,
    get,
    images_of,
    picture,
    simple,
    small,
    source_of,
    tarred,
    zipped,
)

# What goes wrong ----------------------------------------------------------------------------------------------------


def test_the_error_names_all_attempts_and_manual_steps(server: Server, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[1]
    mirrors = (
        Mirror("the authors' page", (File("a.zip", (server.url("/gone.zip"),)),)),
        Mirror("another", (File("b.zip", (f"http://127.0.0.1:{closed}/b.zip",)),)),
        Mirror("nowhere", (File("c.zip", ("http://no-such-host.invalid/c.zip",)),)),
    )
    with pytest.raises(AidgnError) as caught:
        get(source_of(ENTRY, *mirrors), tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "PACS could not be downloaded. Tried:"
    assert "the authors' page" in lines[1] and "/gone.zip answered 404 Not Found" in lines[1]
    assert "another" in lines[2] and "Connection refused" in lines[2]
    assert "nowhere" in lines[3] and "online?" in lines[3]
    rest = "\n".join(lines[4:])
    assert "https://example.org/data" in rest and f"{tmp_path}/PACS/<domain>/<class>/<image>" in rest
    assert "aidgn data check PACS" in rest and "a.zip" in rest


@pytest.mark.parametrize("name", SOURCES)
def test_manual_steps_name_page_layout_and_check(name: str) -> None:
    text = manual_steps(name, "/my/data")
    entry = DATASETS[name]
    assert all(domain in text for domain in entry.domains) and SOURCES[name].page in text
    assert f"/my/data/{entry.folder}/<domain>/<class>/<image>" in text and f"aidgn data check {name}" in text


def test_a_missing_image_is_named_by_domain_and_class(server: Server, tmp_path: Path) -> None:
    images = images_of(ENTRY, "kfold/{domain}/{label}/pic_{number:03d}.png")
    del images["kfold/photo/guitar/pic_000.png"]
    url = server.serve("/PACS.zip", zipped(images))
    with pytest.raises(AidgnError, match=r"photo: 41 images, expected 42; photo/guitar: 5 images, expected 6\."):
        get(source_of(ENTRY, Mirror("m", (File("PACS.zip", (url,)),))), tmp_path)
    assert not (tmp_path / "PACS").exists()


def test_a_damaged_archive_is_fetched_anew_the_next_time(server: Server, tmp_path: Path) -> None:
    url = server.serve("/PACS.zip", ARCHIVE[:2000])
    sources = source_of(ENTRY, Mirror("m", (File("PACS.zip", (url,)),)))
    with pytest.raises(AidgnError, match=r"PACS\.zip, which is damaged or no archive"):
        get(sources, tmp_path)
    server.serve("/PACS.zip", ARCHIVE)
    assert contents(get(sources, tmp_path)) == IMAGES


def test_what_is_there_is_never_overwritten(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "PACS" / "photo" / "dog" / "mine.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    _, mirror = simple(server)
    with pytest.raises(AidgnError, match=f"{tmp_path}/PACS .* not PACS"):
        get(source_of(ENTRY, mirror), tmp_path)
    assert mine.read_bytes() == b"mine" and not server.log


@pytest.mark.parametrize("link", [".downloads", ".downloads/PACS"])
def test_nothing_is_removed_behind_a_link(server: Server, tmp_path: Path, link: str) -> None:
    """A folder of data sets from someone else names a folder whose PACS would be taken for unfinished downloads."""
    sources = source_of(ENTRY, simple(server)[1])
    get(sources, tmp_path)
    mine = tmp_path / "mine" / "PACS"
    mine.mkdir(parents=True)
    (mine / "picture.png").touch()
    shutil.rmtree(tmp_path / ".downloads")
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(mine if "/" in link else mine.parent)
    with pytest.raises(AidgnError, match="symbolic link"):
        get(sources, tmp_path)
    assert (mine / "picture.png").exists()


def test_a_full_disk_is_seen_before(server: Server, tmp_path: Path) -> None:
    route, mirror = simple(server)
    route.first = [lambda handler: handler.status(200, Content_Length=str(10**15))]
    with pytest.raises(AidgnError, match="The disk is full"):
        get(source_of(ENTRY, mirror), tmp_path)


def test_a_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, mirror = simple(server)
    with pytest.raises(AidgnError, match=f"{tmp_path}/file/data/.downloads/PACS"):
        get(source_of(ENTRY, mirror), tmp_path / "file" / "data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(server: Server, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    _, mirror = simple(server)
    with pytest.raises(StorageError, match="choose another folder"):
        get(source_of(ENTRY, mirror), tmp_path)


def test_unknown_and_built_in_data_sets(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="Did you mean PACS"):
        download("PACSS", tmp_path)
    with pytest.raises(AidgnError, match="comes with the package"):
        download("digits", tmp_path)


# The layout of each data set ----------------------------------------------------------------------------------------


def test_office_home_as_published_and_per_domain(server: Server, tmp_path: Path) -> None:
    entry = small("OfficeHome", ("Alarm_Clock", "TV"))
    images = images_of(entry)
    whole = {f"OfficeHomeDataset_10072016/{name}": content for name, content in images.items()}
    whole |= {"OfficeHomeDataset_10072016/imagelist.txt": b"x", "__MACOSX/Art/TV/._pic_000.png": b"x"}
    url = server.serve("/home.zip", zipped(whole))
    folder = get(source_of(entry, Mirror("m", (File("home.zip", (url,)),))), tmp_path / "one")
    assert folder.name == "office_home" and contents(folder) == images
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"Art", "Clipart", "Product", "Real World"}

    files = []
    for domain in entry.domains:
        name = domain.replace(" ", "_")
        part = {
            f"{name}/{path.partition('/')[2]}": content
            for path, content in images.items()
            if path.startswith(f"{domain}/")
        }
        files.append(File(f"{name}.tgz", (server.serve(f"/f/{name}/?dl=1", tarred(part)),)))
    assert contents(get(source_of(entry, Mirror("m", tuple(files))), tmp_path / "two")) == images


def test_vlcs_by_class_names_and_by_splits(server: Server, tmp_path: Path) -> None:
    entry = small("VLCS")
    images = images_of(entry)
    url = server.serve("/VLCS.tar.gz", tarred({f"VLCS/{name}": content for name, content in images.items()}))
    assert contents(get(source_of(entry, Mirror("m", (File("VLCS.tar.gz", (url,)),))), tmp_path / "one")) == images

    # Dassl's copy: CALTECH/{train,crossval,full,test}/{0..4}; full is train and crossval; names repeat between splits.
    names = VLCS.mirrors[1].names
    back = {value: key for key, value in names.items()}
    split: dict[str, bytes] = {}
    for path, content in images.items():
        domain, label, file = path.split("/")
        number = int(file[4:7])
        part = ("train", "crossval", "test")[number % 3]
        for where in (part, "full")[: 1 if part == "test" else 2]:
            at = number // 3 if where == part else number
            split[f"VLCS/{back[domain]}/{where}/{back[label]}/im{at}.png"] = content
    url = server.serve("/vlcs.zip", zipped(split))
    mirror = Mirror("m", (File("vlcs.zip", (url,)),), names=names)
    found = contents(get(source_of(entry, mirror), tmp_path / "two"))
    assert sorted((name.rpartition("/")[0], content) for name, content in found.items()) == sorted(
        (name.rpartition("/")[0], content) for name, content in images.items()
    )


def test_domain_net_takes_what_the_lists_name(server: Server, tmp_path: Path) -> None:
    """The painting domain has no image of one class: its folder is empty, for all domains must have the same."""
    entry = small("DomainNet", ("The_Eiffel_Tower", "t-shirt"))
    images = images_of(entry)
    entry = replace(entry, classes=(), class_counts={}, counts={**entry.counts, "paint": entry.counts["paint"] - 4})
    full = {"clip": "clipart", "info": "infograph", "paint": "painting", "quick": "quickdraw"}
    files = []
    expected = {path: content for path, content in images.items() if not path.startswith("paint/t-shirt")}
    for domain in entry.domains:
        name = full.get(domain, domain)
        members = {
            f"{name}/{path.partition('/')[2]}": content
            for path, content in expected.items()
            if path.startswith(f"{domain}/")
        }
        lines = [f"{path} {index}" for index, path in enumerate(members)]
        members[f"{name}/t-shirt/duplicate.png"] = b"a duplicate"
        files.append(File(f"{name}.zip", (server.serve(f"/{name}.zip", zipped(members)),)))
        for part, chosen in (("train", lines[::2]), ("test", lines[1::2])):
            text = "".join(f"{line}\n" for line in chosen).encode()
            files.append(File(f"{name}_{part}.txt", (server.serve(f"/{name}_{part}.txt", text, kind="text/plain"),)))
    mirror = Mirror("m", tuple(files), arrange="listed_folders")
    folder = get(source_of(entry, mirror), tmp_path)
    assert contents(folder) == expected
    assert list((folder / "paint" / "t-shirt").iterdir()) == []
    assert load_dataset("DomainNet", tmp_path).classes == ["The_Eiffel_Tower", "t-shirt"]


def camera_traps(
    server: Server, entry: DatasetInfo, left_out: int, zipped_json: bool
) -> tuple[Mirror, dict[str, bytes]]:
    """Images of six locations with eleven categories, annotated in COCO camera-traps form; and what is to be taken."""
    images = images_of(entry)
    categories = [*entry.classes, "car"]
    data: dict[str, list] = {
        "categories": [{"id": 30 + i, "name": name} for i, name in enumerate(categories)],
        "images": [],
        "annotations": [],
    }
    tar, expected = {}, {}
    for number, (path, content) in enumerate(images.items()):
        domain, label, _ = path.split("/")
        file = f"{number:04d}-23d2.png"
        tar[f"eccv_18_all_images_sm/{file}"] = content
        location = domain.removeprefix("location_")
        data["images"].append(
            {"id": f"id{number}", "file_name": file, "location": location if zipped_json else int(location)}
        )
        kept = number >= left_out
        labels = [label if kept else "car", "car"] + [label] * kept  # several boxes of one animal
        data["annotations"] += [
            {"id": len(data["annotations"]), "image_id": f"id{number}", "category_id": 30 + categories.index(name)}
            for name in labels
        ]
        if kept:
            expected[f"{domain}/{label}/{file}"] = content
    for location in ("7", "130"):
        data["images"].append({"id": f"far{location}", "file_name": f"far{location}.png", "location": location})
        data["annotations"].append({"image_id": f"far{location}", "category_id": 30})
        tar[f"eccv_18_all_images_sm/far{location}.png"] = b"another location"
    if zipped_json:
        name, body = "cct.json.zip", zipped({"caltech_images_20210113.json": json.dumps(data).encode()})
    else:  # in parts that each have the categories
        halves = [
            {"categories": data["categories"], "images": data["images"][i::2], "annotations": data["annotations"][i::2]}
            for i in range(2)
        ]
        name, body = (
            "eccv.tar.gz",
            tarred(
                {
                    f"eccv_18_annotation_files/{part}.json": json.dumps(half).encode()
                    for part, half in zip(("train", "cis_test"), halves, strict=True)
                }
            ),
        )
    files = (
        File("images.tar.gz", (server.serve("/images.tar.gz", tarred(tar)),)),
        File(name, (server.serve(f"/{name}", body),)),
    )
    return Mirror(name, files, arrange="camera_traps"), expected


@pytest.mark.parametrize("zipped_json", [False, True])
@pytest.mark.parametrize("left_out", [0, 3, 4])
def test_terra_incognita_is_cut_out_of_camera_traps(
    server: Server, tmp_path: Path, zipped_json: bool, left_out: int
) -> None:
    """Both counts are accepted and told apart; any other is an error that names both."""
    entry = small("TerraIncognita")
    other = {**entry.counts, "location_100": entry.counts["location_100"] - 3}
    entry = replace(entry, class_counts={}, other_counts=other)
    mirror, expected = camera_traps(server, small("TerraIncognita"), left_out, zipped_json)
    total, said = sum(entry.counts.values()), list[str]()
    if left_out == 4:
        with pytest.raises(AidgnError, match=r"location_100: 51 images, expected 52\."):
            get(source_of(entry, mirror), tmp_path)
        return
    folder = get(source_of(entry, mirror), tmp_path, on_message=said.append)
    assert folder.name == "terra_incognita" and contents(folder) == expected
    assert (
        f"TerraIncognita published ({total} images)"
        if left_out == 0
        else f"TerraIncognita downloadable today ({total - 3} images)"
    ) in said[-1]


def test_an_image_with_two_categories_lies_in_both(server: Server, tmp_path: Path) -> None:
    data = {
        "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}],
        "images": [{"id": i, "file_name": f"{i}.png", "location": "38"} for i in range(2)],
        "annotations": [
            {"image_id": 0, "category_id": 1},
            {"image_id": 0, "category_id": 2},
            {"image_id": 1, "category_id": 2},
        ],
    }
    entry = DatasetInfo(
        "TerraIncognita", ("location_38",), ("L38",), 2, "terra_incognita", {"location_38": 3}, classes=("cat", "dog")
    )
    files = (
        File("i.tar.gz", (server.serve("/i.tar.gz", tarred({"a/0.png": picture(0), "a/1.png": picture(1)})),)),
        File("a.json.zip", (server.serve("/a.json.zip", zipped({"a.json": json.dumps(data).encode()})),)),
    )
    folder = get(source_of(entry, Mirror("m", files, arrange="camera_traps")), tmp_path)
    assert contents(folder) == {
        "location_38/cat/0.png": picture(0),
        "location_38/dog/0.png": picture(0),
        "location_38/cat/1.png": picture(1),
    }


def test_annotations_that_are_none(server: Server, tmp_path: Path) -> None:
    files = (
        File("i.tar.gz", (server.serve("/i.tar.gz", tarred({"a/0.png": b"x"})),)),
        File("a.json.zip", (server.serve("/a.json.zip", zipped({"a.json": b'{"images": [{}]}'})),)),
    )
    with pytest.raises(AidgnError, match="not in COCO camera-traps form"):
        get(source_of(small("TerraIncognita"), Mirror("m", files, arrange="camera_traps")), tmp_path)


# Hugging Face -------------------------------------------------------------------------------------------------------


def hub(server: Server, entry: DatasetInfo, tables: list[bytes], wrong_oid: bool = False) -> Mirror:
    """The API and the files of a repository, at the addresses of the real mirror below another host."""
    real = hugging_face("someone/data", "main")
    listing = [{"type": "file", "path": "README.md", "size": 5, "oid": "x"}]
    for number, table in enumerate(tables):
        path = f"data/train-{number:05d}-of-{len(tables):05d}.parquet"
        server.serve(f"/datasets/someone/data/resolve/main/{path}", table)
        listing.append(
            {
                "type": "file",
                "path": path,
                "size": len(table),
                "oid": "x",
                "lfs": {  # type: ignore[dict-item]
                    "oid": "0" * 64 if wrong_oid else hashlib.sha256(table).hexdigest(),
                    "size": len(table),
                },
            }
        )
    server.serve("/api/datasets/someone/data/tree/main/data", json.dumps(listing).encode(), kind="application/json")
    return replace(
        real,
        listing=real.listing.replace("https://huggingface.co", server.url("")),
        resolve=real.resolve.replace("https://huggingface.co", server.url("")),
    )


def table_of(rows: list[dict], features: dict) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("numbered", [False, True])
def test_parquet_rows_become_files(server: Server, tmp_path: Path, numbered: bool) -> None:
    """PACS gives domains as words, DomainNet as numbers; some rows have no file name or one that is taken."""
    entry = small("PACS")
    rows = [
        {
            "image": {"bytes": content, "path": (None, "pic.png", f"{number}.png")[number % 3]},
            "domain": entry.domains.index(path.split("/")[0]) if numbered else path.split("/")[0],
            "label": entry.classes.index(path.split("/")[1]),
        }
        for number, (path, content) in enumerate(IMAGES.items())
    ]
    features: dict = {
        "image": {"_type": "Image"},
        "label": {"names": list(entry.classes), "_type": "ClassLabel"},
        "domain": {"names": list(entry.domains)} if numbered else {"dtype": "string"},
    }
    tables = [table_of(rows[:100], features), table_of(rows[100:], features)]
    found = contents(get(source_of(entry, hub(server, entry, tables)), tmp_path))
    assert sorted((name.rpartition("/")[0], content) for name, content in found.items()) == sorted(
        (name.rpartition("/")[0], content) for name, content in IMAGES.items()
    )
    assert {Path(name).suffix for name in found} == {".png"}
    assert found["art_painting/dog/000000.png"] == rows[0]["image"]["bytes"]  # type: ignore[index]


def test_parquet_with_wrong_checksum_or_columns(server: Server, tmp_path: Path) -> None:
    table = table_of([{"image": {"bytes": b"x", "path": "a.png"}, "label": 0}], {})
    with pytest.raises(AidgnError, match="sha256 checksum"):
        get(source_of(ENTRY, hub(server, ENTRY, [table], wrong_oid=True)), tmp_path)
    with pytest.raises(AidgnError, match="not a table of image, domain and label"):
        get(source_of(ENTRY, hub(server, ENTRY, [table])), tmp_path)
    with pytest.raises(AidgnError, match="not a table of image, domain and label"):
        get(source_of(ENTRY, hub(server, ENTRY, [b"no parquet"])), tmp_path)


@pytest.mark.parametrize("listing", [b"[" * 100_000, b'[{"path": "a.parquet", "size": "x"}]', b"3", b"[]"])
def test_a_listing_that_is_none(server: Server, tmp_path: Path, listing: bytes) -> None:
    mirror = Mirror("m", arrange="parquet", listing=server.serve("/list", listing), resolve=server.url("/"))
    with pytest.raises(AidgnError, match="list"):
        get(source_of(ENTRY, mirror), tmp_path)


def test_without_pyarrow_the_next_mirror_is_tried(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    parquet = hub(server, ENTRY, [b"x"])
    with pytest.raises(AidgnError, match="pip install pyarrow"):
        get(source_of(ENTRY, parquet), tmp_path)
    _, good = simple(server)
    assert contents(get(source_of(ENTRY, parquet, good), tmp_path)) == IMAGES
    assert {request.path for request in server.log} == {"/PACS.zip"}  # nothing was downloaded in vain


# MNIST --------------------------------------------------------------------------------------------------------------

TRAIN, TEST = 240, 60


def idx(values: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + values.tobytes())


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images whose top left corner tells their number, and labels."""
    generator = np.random.default_rng(0)
    images = generator.integers(1, 256, (TRAIN + TEST, 28, 28)).astype(np.uint8)
    return images, generator.integers(0, 10, TRAIN + TEST).astype(np.uint8)


def mnist(server: Server, arrange: str, **changed: bytes) -> Mirror:
    images, labels = digits()
    bodies = {
        "train-images": idx(images[:TRAIN]),
        "train-labels": idx(labels[:TRAIN]),
        "t10k-images": idx(images[TRAIN:]),
        "t10k-labels": idx(labels[TRAIN:]),
    }
    bodies |= {name.replace("_", "-"): body for name, body in changed.items()}
    names = {file.name: file.name.rpartition("-idx")[0] for file in MNIST}
    return Mirror(
        "MNIST",
        tuple(File(name, (server.serve(f"/{name}", bodies[part]),)) for name, part in names.items()),
        arrange=arrange,
    )


def mnist_entry(name: str) -> DatasetInfo:
    entry = DATASETS[name]
    return replace(entry, counts=dict.fromkeys(entry.domains, (TRAIN + TEST) // len(entry.domains)))


def test_rotated_mnist(server: Server, tmp_path: Path) -> None:
    """Against torchvision's rotation of the images dealt out in the order of the stated seed."""
    said: list[str] = []
    mirror = replace(mnist(server, "rotated_mnist"), note=SOURCES["RotatedMNIST"].mirrors[0].note)
    folder = get(source_of(mnist_entry("RotatedMNIST"), mirror), tmp_path, on_message=said.append)
    assert "made from MNIST" in said[-1] and "RandomState(0)" in said[-1]
    images, labels = digits()
    order = np.random.RandomState(0).permutation(len(images))
    for position, angle in enumerate((0, 15, 30, 45, 60, 75)):
        mine = order[position::6]
        for number, at in enumerate(mine):
            path = folder / str(angle) / str(labels[at]) / f"{number:05d}.png"
            expected = rotate(Image.fromarray(images[at]), angle, InterpolationMode.BILINEAR, fill=0)
            with Image.open(path) as image:
                assert image.mode == "L" and image.size == (28, 28)
                assert np.array_equal(np.asarray(image), np.asarray(expected))
        assert len(list((folder / str(angle)).glob("*/*.png"))) == len(mine)


def test_colored_mnist(server: Server, tmp_path: Path) -> None:
    """Each image is one of MNIST in one colour; labels and colours are flipped as often as they should be."""
    folder = get(source_of(mnist_entry("ColoredMNIST"), mnist(server, "colored_mnist")), tmp_path)
    images, labels = digits()
    number_of = {image.tobytes(): number for number, image in enumerate(images)}
    order = list(np.random.RandomState(0).permutation(len(images)))
    seen = []
    for position, (domain, flip) in enumerate((("+90%", 0.1), ("+80%", 0.2), ("-90%", 0.9))):
        noisy, flipped, count = 0, 0, 0
        for path in sorted((folder / domain).glob("*/*.png")):
            label = int(path.parent.name)
            with Image.open(path) as image:
                pixels = np.asarray(image)
            assert pixels.shape == (28, 28, 3) and not pixels[..., 2].any()
            colour = 1 if pixels[..., 1].any() else 0
            assert not pixels[..., 1 - colour].any()
            number = number_of[np.ascontiguousarray(pixels[..., colour]).tobytes()]
            assert order.index(number) == 3 * int(path.stem) + position
            seen.append(number)
            noisy += label != int(labels[number] < 5)
            flipped += colour != label
            count += 1
        for found, probability in ((noisy, 0.25), (flipped, flip)):  # within four standard deviations
            assert abs(found - count * probability) < 4 * (count * probability * (1 - probability)) ** 0.5
    assert sorted(seen) == list(range(TRAIN + TEST))


def test_idx_files_are_read_strictly(server: Server, tmp_path: Path) -> None:
    images, labels = digits()
    whole = gzip.decompress(idx(images[:TRAIN]))
    for body, problem in (
        (gzip.compress(whole + b"x"), "longer than its beginning says"),
        (gzip.compress(whole[:-1]), "shorter than its beginning says"),
        (gzip.compress(b"\0\0\x0d\3" + whole[4:]), "not an idx file"),
        (gzip.compress(whole[:9]), "not an idx file"),
        (idx(images[:TRAIN, :14]), "not an idx file"),
        (gzip.compress(whole)[:-9], "damaged"),
        (whole, "damaged"),
    ):
        with pytest.raises(AidgnError, match=problem):
            get(source_of(mnist_entry("RotatedMNIST"), mnist(server, "rotated_mnist", train_images=body)), tmp_path)
    for wrong in (labels[: TRAIN - 1], labels[:TRAIN] + 10):
        with pytest.raises(AidgnError, match="labels that do not belong to the images"):
            get(
                source_of(mnist_entry("RotatedMNIST"), mnist(server, "rotated_mnist", train_labels=idx(wrong))),
                tmp_path / str(wrong[0]),
            )


# The table ----------------------------------------------------------------------------------------------------------


def test_sources_are_well_formed() -> None:
    assert set(SOURCES) == {name for name, info in DATASETS.items() if not info.page} - {"digits"}
    for name, source in SOURCES.items():
        assert source.info is DATASETS[name]
        files: dict[str, File] = {}
        for mirror in source.mirrors:
            assert mirror.arrange in LAYOUTS
            assert bool(mirror.files) != bool(mirror.listing and mirror.resolve)
            for file in mirror.files:
                assert files.setdefault(file.name, file) is file  # two files of one name would be taken for each other
                assert file.urls and all(url.startswith(("https://", "http://")) for url in file.urls)
                kind, _, digest = file.digest.partition(":")
                assert not file.digest or (
                    kind in hashlib.algorithms_guaranteed
                    and len(digest) >= 32
                    and set(digest) <= set("0123456789abcdef")
                )
            for known in mirror.names.values():
                assert known in (*source.info.domains, *source.info.classes)


def test_few_files_have_no_published_checksum() -> None:
    files = {file for source in SOURCES.values() for mirror in source.mirrors for file in mirror.files}
    assert {file.name for file in files if not file.digest} == {
        "vlcs-dassl.zip",
        *("Art.tgz", "Clipart.tgz", "Product.tgz", "Real_World.tgz"),  # TLlib's OfficeHome
        "caltech_camera_traps.json.zip",
    }


def test_mnist_checksums_are_torchvisions() -> None:
    from torchvision.datasets import MNIST as PUBLISHED

    assert {file.name: file.digest for file in MNIST} == {name: f"md5:{md5}" for name, md5 in PUBLISHED.resources}
    assert all(mirror.rstrip("/") in "".join(MNIST[0].urls) for mirror in PUBLISHED.mirrors)
