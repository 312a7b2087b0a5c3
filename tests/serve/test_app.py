"""Every request gets its proper answer: what the model says, or an error that says what is wrong; nobody else's pages
get any."""

import asyncio
import base64
import copy
import io
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import aidgn
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import Model, load_model
from aidgn.inference.explanation import explain, paint
from aidgn.new_site.confidence import Outputs, UnseenSite
from aidgn.new_site.expectations import measure
from aidgn.serve.access import Access
from aidgn.serve.app import create_app
from aidgn.serve.decoding import FAST_DECODERS, Decoders
from aidgn.serve.engine import DECODED, Engine, Limits
from aidgn.serve.neighbors import LatentSpace
from aidgn.training import RunSpec, train

DIGITS = load_dataset("digits")
HOME = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    spec = RunSpec("digits", "AIDGN", "chalk", steps=3, eval_every=3, hyper_parameters={"batch_size": 8})
    return load_model(train(spec, tmp_path_factory.mktemp("runs"), device="cpu"), "cpu")


@pytest.fixture(scope="module")
def space(model: Model) -> LatentSpace:
    random = np.random.default_rng(0)
    directions = random.random((30, model.network.num_features)).astype(np.float32)
    return LatentSpace(
        directions / np.linalg.norm(directions, axis=1, keepdims=True),
        DIGITS.labels[:30],
        DIGITS.domain_of[:30],
        random.random((20, 2)),
        np.arange(30),
        DIGITS,
    )


@pytest.fixture(scope="module")
def client(model: Model, space: LatentSpace) -> Iterator[TestClient]:
    with TestClient(create_app(model, space, Limits(megabytes=2, images=4)), HOME) as client:
        yield client


def encoded(pixels: np.ndarray | Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, form, **options)
    return file.getvalue()


def digit(index: int) -> bytes:
    return encoded(DIGITS.pixels[index])


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that says to be side x side pixels."""
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(10**6))), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def send(client: Any, *files: tuple[str, bytes], **options: Any) -> httpx.Response:
    return client.post("/api/predict", files=[("images", file) for file in files], **options)


# Answers --------------------------------------------------------------------------------------------------------------


def test_answers_match_the_model(client: TestClient, model: Model, space: LatentSpace) -> None:
    rows = [3, 700, 1500]
    answer = send(client, *((f"{row}.png", digit(row)) for row in rows))
    assert answer.status_code == 200
    wanted = model.predict(DIGITS.pixels[rows])
    for found, row, number in zip(answer.json()["images"], rows, range(3), strict=True):
        assert found["name"] == f"{row}.png" and found["label"] == wanted.labels[number]
        assert list(found["probabilities"]) == DIGITS.classes
        np.testing.assert_allclose(list(found["probabilities"].values()), wanted.probabilities[number], atol=1e-6)
        assert found["probability"] == max(found["probabilities"].values())
        assert wanted.warnings is not None and (found["warning"] is None) == (wanted.warnings[number] is None)
        place, near = space.locate(wanted.features[number].numpy())
        assert found["position"] == pytest.approx(place, abs=1e-4) and len(found["nearest"]) == 6
        first = found["nearest"][0]
        assert first["distance"] == pytest.approx(near[0][1], abs=1e-5)
        assert first["class"] == DIGITS.classes[DIGITS.labels[first["index"]]]
        thumbnail = client.get(first["thumbnail"])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(thumbnail.content))), DIGITS.pixels[first["index"]])


def test_an_explained_answer_has_a_heatmap(client: TestClient, model: Model) -> None:
    files = [("images", (f"{row}.png", digit(row))) for row in (3, 700)]
    explained = client.post("/api/predict?explain=1", files=files).json()["images"]
    for answer, plain, row in zip(
        explained, client.post("/api/predict", files=files).json()["images"], (3, 700), strict=True
    ):
        assert plain["heatmap"] is None and plain["label"] == answer["label"]
        found = Image.open(io.BytesIO(base64.b64decode(answer["heatmap"].removeprefix("data:image/png;base64,"))))
        pixels = DIGITS.pixels[row]
        assert np.array_equal(np.asarray(found), np.asarray(paint(pixels, explain(model, [pixels])[0])))


def test_chances_and_the_site_of_the_latest_pictures(model: Model, client: TestClient) -> None:
    assert client.get("/api/site").json() == {"site": None}
    random = np.random.default_rng(0)
    outputs = Outputs(random.normal(size=(60, 10)), random.integers(10, size=60), {})
    knowing = copy.copy(model)
    knowing.expectations = measure([UnseenSite(name, 0, outputs, outputs) for name in "ab"], outputs, model.classes)
    assert client.get("/api/model").json()["expected"] is None
    with TestClient(create_app(knowing), HOME) as other:
        assert other.get("/api/model").json()["expected"] == knowing.expectations.accuracies.describe()
        other.post("/api/predict?explain=1", files=[("images", digit(5))])  # was sent before, so it does not count
        pictures = [encoded(DIGITS.pixels[number]) for number in (0, 700)]
        answers = other.post("/api/predict", files=[("images", picture) for picture in pictures]).json()["images"]
        wanted = knowing.predict(list(DIGITS.pixels[[0, 700]])).chances
        np.testing.assert_allclose([answer["chance"] for answer in answers], wanted, rtol=1e-4)
        site = other.get("/api/site").json()["site"]
        schema = other.get("/api/schema").json()["paths"]["/api/site"]["get"]["responses"]["200"]["content"]
        described = schema["application/json"]["schema"]["properties"]["site"]
        assert {*described["required"]} == {*described["properties"]} <= site.keys()
        assert other.get("/api/model").json()["warned"] == knowing.expectations.mean("warned")
    assert client.get("/api/model").json()["warned"] is None
    assert site["pictures"] == 2 and site["mean_chance"] == pytest.approx(wanted.mean(), rel=1e-4)
    assert not site["alarm"] and "Too few pictures" in site["text"]


def test_good_and_bad_pictures_together(client: TestClient) -> None:
    answer = send(client, ("letter.jpg", b"Dear all,\n"), ("<b>3</b>.png", digit(3)), ("cut.png", digit(3)[:90]))
    assert answer.status_code == 200
    letter, three, cut = answer.json()["images"]
    assert letter["error"]["status"] == 415 and "not a picture" in letter["error"]["message"]
    assert cut["error"]["status"] == 422 and cut["error"]["message"].startswith("This picture is damaged")
    assert three["name"] == "<b>3</b>.png" and three["label"] in DIGITS.classes
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"Dear all,\n", 415, "not a picture"),
        (b"", 415, "empty (0 bytes)"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", 415, "not a picture"),
        (digit(0)[:60], 422, "damaged"),
        (bomb(60_000), 413, "too many pixels"),
        (bomb(9000), 413, "9,000 x 9,000"),
        (encoded(Image.new("1", (12_000, 12_000))), 413, "12,000 x 12,000"),
        (encoded(Image.new("LA", (5000, 5000))), 413, "16 million"),
        (encoded(Image.new("RGB", (10_000, 300), "teal"), "JPEG"), 200, ""),
        (encoded(Image.new("RGB", (10_000, 2000), "teal"), "JPEG"), 200, ""),
        (encoded(Image.new("RGBA", (10_000, 500), "teal")), 200, ""),
        (encoded(Image.new("I;16", (300, 200), 30_000)), 200, ""),
        (encoded(Image.new("P", (30, 20)), "GIF"), 200, ""),
    ],
)
def test_odd_pictures(content: bytes, status: int, words: str, client: TestClient) -> None:
    answer = send(client, ("a.jpg", content))
    [image] = answer.json()["images"]
    assert answer.status_code == status
    if status != 200:
        assert image["error"]["status"] == status and words in image["error"]["message"]
        assert "/tmp" not in image["error"]["message"]


def test_invalid_requests(client: TestClient) -> None:
    def refused(answer: httpx.Response, status: int, words: str) -> None:
        assert answer.status_code == status and answer.json()["error"]["status"] == status
        assert words in answer.json()["error"]["message"]

    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    refused(client.post("/api/predict", json={}), 415, "multipart/form-data")
    refused(client.post("/api/predict", data={"images": "text"}, files={}), 415, "multipart")
    refused(client.post("/api/predict", files={"note": (None, "text")}), 422, "no picture")
    refused(client.post("/api/predict", content=b"--x--\r\n", headers=multipart), 422, "no picture")
    refused(client.post("/api/predict", content=b"nonsense", headers=multipart), 422, "")
    refused(client.post("/api/predict", content=b"", headers={"Content-Type": "multipart/form-data"}), 422, "")
    refused(send(client, *[("a.png", digit(0))] * 5), 413, "4 pictures")
    refused(send(client, ("a.png", bytes(2_500_000))), 413, "larger than 2 MB")
    refused(send(client, ("a.png", bytes(9_000_000))), 413, "larger than 2 MB")
    refused(
        client.post(
            "/api/predict",
            headers=multipart,  # no Content-Length
            content=(part for part in [b"--x\r\n", *[bytes(10**6)] * 3]),
        ),
        413,
        "larger than 2 MB",
    )
    refused(client.get("/api/predict"), 405, "GET")
    refused(client.get("/nowhere"), 404, "nothing here")
    for path in (
        "/api/training/999",
        "/api/training/-1",
        "/api/training/1e3",
        f"/api/training/{'9' * 5000}",
        "/api/training/..%2f..%2fetc%2fpasswd",
        "/../../etc/passwd",
        "/api/training/%00",
        "/page.html",
    ):
        refused(client.get(path), 404, "")


# Who may ask ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "192.168.1.7"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": HOME}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:9"}, 403),
        ({"Origin": "https://127.0.0.1:8000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_only_own_pages(headers: dict[str, str], status: int, client: TestClient) -> None:
    assert client.get("/api/health", headers=headers).status_code == status
    assert send(client, ("a.png", digit(0)), headers=headers).status_code == status


TOKEN = "a-token-for-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def guarded(model: Model, space: LatentSpace) -> Iterator[TestClient]:
    access = Access(("Pictures.example.org",), "/aidgn", token=TOKEN)
    with TestClient(create_app(model, space, access=access), HOME, follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize("root", ["", "/aidgn"])  # whether the proxy removes the path
def test_paths_behind_a_proxy(root: str, guarded: TestClient) -> None:
    headers = {**BEARER, "Host": "pictures.example.org"}
    [image] = guarded.post(f"{root}/api/predict", files={"images": digit(0)}, headers=headers).json()["images"]
    thumbnail = image["nearest"][0]["thumbnail"]
    assert thumbnail.startswith("/aidgn/api/training/") and guarded.get(thumbnail, headers=headers).status_code == 200
    assert guarded.get(f"{root}/", headers=headers).text.startswith("<!doctype html>")
    assert guarded.get(f"{root}/nowhere", headers=headers).status_code == 404
    assert guarded.get(f"{root}/api/health", headers={"Host": "example.org"}).status_code == 403
    assert guarded.get("/aidgn", headers=headers).headers["location"] == "/aidgn/"


def test_the_token(guarded: TestClient) -> None:
    assert guarded.get("/api/health").status_code == 200
    for path in ("/api/model", "/api/schema", "/api/training/0", "/metrics", "/nowhere", "/api/predict"):
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"}):
            answer = guarded.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["status"] == 401
        assert guarded.get(path, headers=BEARER).status_code != 401
    assert guarded.get(f"/api/model?token={TOKEN}").status_code == 401  # only the page takes it from the address
    for address in ("/", "/?token=wrong", "/?token=%ff%00", f"/?token={TOKEN[:-1]}"):
        answer = guarded.get(address)
        assert answer.status_code == 401 and "<form" in answer.text and "set-cookie" not in answer.headers
    answer = guarded.get(f"/?token={TOKEN}")
    assert answer.status_code == 303 and answer.headers["location"] == "/aidgn/"
    [cookie] = answer.headers.get_list("set-cookie")
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Path=/aidgn" in cookie and "Secure" not in cookie
    name_and_value = cookie.partition(";")[0]
    assert guarded.get("/api/model", headers={"Cookie": name_and_value}).status_code == 200
    assert guarded.get("/api/model", headers={"Cookie": f"{name_and_value}x"}).status_code == 401
    guarded.cookies.clear()


@pytest.mark.parametrize(
    "settings",
    [
        {"token": "short"},
        {"token": "sixteen characters"},
        {"root_path": "aidgn"},
        {"root_path": "/aidgn/"},
        {"root_path": "/api/v1"},
        {"hosts": ("https://example.org",)},
        {"hosts": ("example.org:8000",)},
        {"proxies": ("nginx",)},
        {"proxies": ("10.0.0.1/8",)},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(AidgnError):
        Access(**settings)


def test_metrics(model: Model) -> None:
    with TestClient(create_app(model, name='a "b"\n'), HOME) as client:
        labels = [send(client, ("a.png", digit(row))).json()["images"][0]["label"] for row in (0, 700, 1500)]
        send(client, ("b.txt", b"x"), ("a.png", digit(0)))
        send(client, ("b.txt", b"x"))
        labels.append(labels[0])
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert found["aidgn_predict_requests_total", "200"] == 4 and found["aidgn_predict_requests_total", "415"] == 1
    assert found["aidgn_predict_seconds_count",] == 5 and found["aidgn_working",] == 0
    for label, count in Counter(labels).items():
        assert found["aidgn_pictures_total", label] == count
    assert ("aidgn_model", 'a "b"\n', aidgn.__version__) in found


def test_the_folder_of_a_killed_server_is_removed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "aidgn-serve-of-a-killed-server"
    left.mkdir()
    (left / "picture").touch()
    with TestClient(create_app(model, None, Limits()), HOME) as client:
        assert client.get("/api/health").status_code == 200 and not left.exists()
        assert len([*tmp_path.glob("aidgn-serve-*")]) == 1
    assert not [*tmp_path.glob("aidgn-serve-*")]


def test_page_and_its_headers(client: TestClient) -> None:
    page = client.get("/", headers={"Sec-Fetch-Site": "cross-site"})  # a link to it is fine
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for answer in (page, client.get("/api/health"), client.get("/nowhere"), client.get("/", headers={"Host": "x.org"})):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert not any(name.startswith("access-control") for name in answer.headers)
    addresses = page.text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in addresses and "https://" not in addresses and "innerHTML" not in page.text


# The schema -----------------------------------------------------------------------------------------------------------


def test_answers_fit_the_schema(client: TestClient) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = client.get("/api/schema").json()
    assert schema["openapi"] == "3.1.0" and schema["x-limits"]["images"] == 4
    too_large = schema["paths"]["/api/predict"]["post"]["responses"]["413"]["description"]
    assert "64 million" in too_large and "16 million" in too_large
    answers = {
        "200": send(client, ("a.png", digit(0)), ("b.txt", b"x")),
        "415": send(client, ("b.txt", b"x")),
        "413": send(client, ("b.png", bytes(2_500_000))),
        "422": client.post("/api/predict", files={"a": (None, "")}),
        "403": client.post("/api/predict", headers={"Origin": "null"}),
    }
    for status, answer in answers.items():
        content = schema["paths"]["/api/predict"]["post"]["responses"][status]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(content)
        assert str(answer.status_code) == status
        jsonschema.validate(answer.json(), content)
    health = schema["paths"]["/api/health"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(client.get("/api/health").json(), health)
    about = client.get("/api/model").json()
    assert about["classes"] == DIGITS.classes and len(about["map"]) == 20 and about["limits"]["megabytes"] == 2
    assert about["false_alarms"] == pytest.approx(0.01)


# Under load -----------------------------------------------------------------------------------------------------------


class Slow:
    """The model, each batch of which takes this many seconds more."""

    def __init__(self, model: Model, seconds: float):
        self.model, self.seconds, self.batches = model, seconds, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, pixels: list[np.ndarray]) -> Any:
        self.batches.append(len(pixels))
        time.sleep(self.seconds)
        return self.model.forward(pixels)


def test_time_and_number_of_requests_are_limited(model: Model) -> None:
    slow = Slow(model, 1.5)
    limits = Limits(seconds=1, requests=1, waiting=2)
    with TestClient(create_app(slow, None, limits), HOME) as client, ThreadPoolExecutor(8) as pool:  # type: ignore[arg-type]
        answers = list(pool.map(lambda n: send(client, ("a.png", digit(n))), range(8)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {429, 503} and statuses.count(429) <= 5  # one works, two wait; fewer if not all at once
        assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
        assert "requests are here" in next(a for a in answers if a.status_code == 429).json()["error"]["message"]
        slow.seconds = 0
        until = time.monotonic() + 60
        while send(client, ("a.png", digit(0))).status_code != 200:  # the network is still busy with a lost request
            assert time.monotonic() < until
        health = client.get("/api/health").json()
        assert (health["working"], health["waiting"]) == (0, 0)


def test_requests_share_batches(model: Model) -> None:
    slow = Slow(model, 0.2)
    with TestClient(create_app(slow, None, Limits(requests=50)), HOME) as client, ThreadPoolExecutor(24) as pool:  # type: ignore[arg-type]
        answers = list(pool.map(lambda n: send(client, ("a.png", digit(n))), range(24)))
    assert all(answer.status_code == 200 for answer in answers)
    wanted = model.predict(DIGITS.pixels[:24]).labels
    assert [answer.json()["images"][0]["label"] for answer in answers] == wanted
    assert sum(slow.batches) == 24 and len(slow.batches) < 18


def test_decoded_pictures_are_few(model: Model, tmp_path: Path) -> None:
    """However many are asked for at once, few wait for the network."""
    (tmp_path / "a.png").write_bytes(digit(0))
    decoded, most = 0, 0

    class Counting(Decoders):
        async def decode(self, path: Path) -> np.ndarray:
            nonlocal decoded, most
            pixels = await super().decode(path)
            decoded += 1
            most = max(most, decoded)
            return pixels

    class Subtracting(Slow):
        def forward(self, pixels: list[np.ndarray]) -> Any:
            nonlocal decoded
            answer = super().forward(pixels)
            decoded -= len(pixels)
            return answer

    async def ask() -> list[Any]:
        engine = Engine(Subtracting(model, 0.2), None, Limits())  # type: ignore[arg-type]
        engine.decoders.close()
        engine.decoders = Counting(model.slot, 1)
        turn = asyncio.Semaphore(FAST_DECODERS)
        answers = await asyncio.gather(*(engine.classify(tmp_path / "a.png", str(n), turn) for n in range(300)))
        engine.close()
        return answers

    assert {answer["label"] for answer in asyncio.run(ask())} == set(model.predict(DIGITS.pixels[0]).labels)
    assert 32 < most <= DECODED


def test_requests_do_not_change_each_other(tmp_path: Path) -> None:
    spec = RunSpec("digits", "ARM", "chalk", steps=1, eval_every=1, hyper_parameters={"batch_size": 8})
    model = load_model(train(spec, tmp_path, device="cpu"), "cpu")
    with TestClient(create_app(model, None), HOME) as client:
        answer = send(client, *((f"{n}.png", digit(n)) for n in range(6))).json()
    for number, found in enumerate(answer["images"]):
        alone = model.predict(DIGITS.pixels[number]).probabilities[0]
        np.testing.assert_allclose(list(found["probabilities"].values()), alone, atol=1e-6)
