"""Models go to the Hub and come back, through a server that speaks the part of its protocol that the library uses."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml

from aidgn import hub
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.inference import load_model
from aidgn.inference.export import push
from aidgn.selection import load_records, select
from aidgn.serve import name_model

DIGITS = load_dataset("digits")
TOKEN = "hf_of_the_tests"


class Hub(ThreadingHTTPServer):
    """Repositories as dictionaries of files, with every commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository, commit, file
        self.large: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.fetched: list[str] = []

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes] | None:
        commits = self.commits[repository]
        return commits[list(commits)[-1]] if revision == "main" else commits.get(revision)

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(f"{len(self.commits[repository])}".encode()).hexdigest()
        self.commits[repository][name] = files
        return name


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, body: object = None, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.large[hashlib.sha256(content).hexdigest()] = content
        self.answer(200)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        routes: dict[str, Callable[..., None]] = {
            r"/api/repos/create": self.create,
            r"/api/validate-yaml": self.validate_yaml,
            r"/api/models/(.+)/preupload/main": self.preupload,
            r"/(.+)\.git/info/lfs/objects/batch": self.offer_upload,
            r"/api/models/(.+)/commit/main": self.commit,
        }
        if self.path != "/api/validate-yaml" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, self.path.partition("?")[0]):
                return route(text, *found.groups())
        raise AssertionError(self.path)

    def create(self, text: str) -> None:
        asked = json.loads(text)
        repository = f"{asked.get('organization') or 'user'}/{asked['name']}"
        if repository in self.server.commits:
            return self.answer(409, {"url": f"{self.server.url}/{repository}", "error": "exists"})
        self.server.commits[repository] = {}
        self.server.commit(repository, {".gitattributes": b""})
        if asked.get("private") or asked.get("visibility") == "private":
            self.server.private.add(repository)
        self.answer(200, {"url": f"{self.server.url}/{repository}", "name": repository})

    def validate_yaml(self, text: str) -> None:
        front = json.loads(text)["content"].split("---\n")[1]
        assert yaml.safe_load(front)["library_name"] == "aidgn"
        self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, text: str, repository: str) -> None:
        files = [
            {"path": file["path"], "uploadMode": "regular" if file["path"].endswith(".md") else "lfs"}
            for file in json.loads(text)["files"]
        ]
        self.answer(200, {"files": [{**file, "shouldIgnore": False} for file in files]})

    def offer_upload(self, text: str, repository: str) -> None:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.server.url}/large/{wanted['oid']}"}}}
            for wanted in json.loads(text)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, text: str, repository: str) -> None:
        files = dict(self.server.files(repository) or {})
        for line in map(json.loads, text.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        oid = self.server.commit(repository, files)
        url = f"{self.server.url}/{repository}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.path == "/api/whoami-v2":
            return self.answer(200 if allowed else 401, {"name": "user", "type": "user", "orgs": []})
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        if not found:  # what the library wants to know besides
            return self.answer(404, {"error": "x"})
        repository, revision, name = found.groups()
        if repository not in self.server.commits or (repository in self.server.private and not allowed):
            return self.answer(401, {"error": "x"}, X_Error_Code="RepoNotFound")
        files = self.server.files(repository, revision)
        if files is None:
            return self.answer(404, {"error": "x"}, X_Error_Code="RevisionNotFound")
        commits = self.server.commits[repository]
        commit = revision if revision in commits else list(commits)[-1]
        if name not in files:
            return self.answer(404, {"error": "x"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        if self.command == "GET":
            self.server.fetched.append(name)
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        self.answer(200, files[name], ETag=etag, X_Repo_Commit=commit)

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants, file_download

    with Hub() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        for module in (constants, file_download):  # older versions copy the constant
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def runs(digits_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One run for each of two unseen domains."""
    folder = tmp_path_factory.mktemp("runs")
    return [digits_run(folder, target=target) for target in ("chalk", "ink")]


def test_there_and_back(server: Hub, runs: list[Path]) -> None:
    assert push(runs[0], "user/digits") == f"{server.url}/user/digits"
    files = server.files("user/digits")
    assert files is not None and set(files) == {".gitattributes", "README.md", "model.onnx", "model.safetensors"}
    model = load_model("hf://user/digits", "cpu")
    np.testing.assert_array_equal(
        model.predict(DIGITS.pixels[:9]).probabilities,
        load_model(runs[0], "cpu").predict(DIGITS.pixels[:9]).probabilities,
    )
    assert server.fetched == ["model.safetensors"]  # nothing that could be a pickle
    assert name_model("hf://user/digits") == "user/digits"


def test_the_card(server: Hub, runs: list[Path]) -> None:
    push(runs[0], "user/digits", onnx=False, private=True)
    files = server.files("user/digits")
    assert server.private == {"user/digits"} and files is not None and "model.onnx" not in files
    _, front, text = files["README.md"].decode().split("---\n", 2)
    card = yaml.safe_load(front)
    assert card["library_name"] == "aidgn" and card["pipeline_tag"] == "image-classification"
    assert "base_model" not in card and 'load_model("hf://user/digits")' in text
    [index] = card["model-index"]
    measured = {
        result["dataset"]["config"]: (result["metrics"][0]["type"], result["metrics"][0]["value"])
        for result in index["results"]
    }
    rows = select(load_records(runs[0].parent), "training")
    wanted = {DIGITS.domains[row["target"]]: ("accuracy", pytest.approx(row["accuracy"], abs=1e-4)) for row in rows}
    assert measured == wanted and set(measured) == {"chalk", "ink"}


def test_revisions_and_copies(server: Hub, runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    push(runs[0], "hf://user/digits", onnx=False)
    first = list(server.commits["user/digits"])[-1]
    push(runs[1], "user/digits", onnx=False)
    assert load_model("hf://user/digits", "cpu").domains == DIGITS.domains
    ensemble = load_model(["hf://user/digits", f"hf://user/digits@{first}"], "cpu")
    assert len(ensemble.predict(DIGITS.pixels[:3]).labels) == 3
    weights = [
        hub.download(address, "model.safetensors") for address in ("hf://user/digits", f"hf://user/digits@{first}")
    ]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    server.shutdown()
    server.server_close()
    assert hub.download("hf://user/digits", "model.safetensors") == weights[0]  # the Hub cannot be reached


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("hf://user", "expected hf://user/name"),
        ("hf://user/a/b", "expected hf://user/name"),
        ("hf://user/../x", "expected hf://user/name"),
        ("hf://user/unknown", "no such model, or it is private"),
        ("hf://user/empty", "has no model.safetensors"),
        ("hf://user/empty@v9", "no such revision"),
    ],
)
def test_what_is_not_there(address: str, words: str, server: Hub) -> None:
    server.commits["user/empty"] = {}
    server.commit("user/empty", {})
    with pytest.raises(AidgnError, match=re.escape(words)):
        load_model(address, "cpu")


def test_who_may_not(server: Hub, runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server.commits["user/secret"] = {}
    server.commit("user/secret", {"model.safetensors": b""})
    server.private.add("user/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(AidgnError, match="it is private"):
        load_model("hf://user/secret", "cpu")
    with pytest.raises(AidgnError, match="user/digits"):
        push(runs[0], "user/digits")
    with pytest.raises(AidgnError, match=r"expected user/name"):
        push(runs[0], "digits")
    assert list(server.commits) == ["user/secret"]


@pytest.mark.slow
def test_a_hub_out_of_reach_is_one_sentence(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "aidgn", "predict", "hf://user/digits", "picture.png"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot be reached" in done.stderr


@pytest.mark.slow
def test_commands(server: Hub, runs: list[Path], tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        environment = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-m", "aidgn", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("push", str(runs[0]), "user/digits", "--no-onnx").strip() == f"{server.url}/user/digits"
    from PIL import Image

    Image.fromarray(DIGITS.pixels[0]).save(tmp_path / "0.png")
    rows = run("predict", "hf://user/digits", str(tmp_path / "0.png"), "--csv", "-").splitlines()
    assert rows[1].split(",")[1] == load_model(runs[0], "cpu").predict(DIGITS.pixels[0]).labels[0]


def test_the_base_model() -> None:
    from aidgn.inference.model_card import find_base_model

    known = {"backbone": "resnet50.tv_in1k", "weights": "hub"}
    assert find_base_model(known) == "timm/resnet50.tv_in1k"
    assert find_base_model({**known, "weights": "none"}) is None
    assert find_base_model({"backbone": "torchvision/resnet18", "weights": "hub"}) is None
