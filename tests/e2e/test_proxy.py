"""aidgn serve behind nginx, with the nginx and systemd files of the documentation."""

import csv
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aidgn.inference.export import export
from aidgn.training import RunSpec, train
from tests.e2e.test_serve import DIGITS, encoded

FILES = Path(__file__).parents[2] / "examples" / "server"
NAME = "pictures.example.org"
TOKEN = "a-token-for-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
MAIN = """
{user}
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    {paths}
    include {folder}/site.conf;
}}
"""


class Site(NamedTuple):
    url: str  # https, through nginx
    direct: str  # http, to aidgn
    process: subprocess.Popen[bytes]
    verify: ssl.SSLContext

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.verify, timeout=60, **options)


def replaced(text: str, values: dict[str, object]) -> str:
    for old, new in values.items():
        assert old in text
        text = text.replace(old, str(new))
    return text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_for(url: str, process: subprocess.Popen[bytes], verify: ssl.SSLContext | bool = True) -> None:
    for _ in range(600):
        assert process.poll() is None
        try:
            if httpx.get(url, verify=verify).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def service_command(model: Path, port: int) -> list[str]:
    """The command of the service file, for another model and port."""
    text = (FILES / "aidgn.service").read_text()
    [command] = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    known = {"/opt/aidgn/bin/aidgn": f"{sys.executable} -m aidgn", "/srv/aidgn/model.safetensors": model, "8000": port}
    return shlex.split(replaced(command.replace("\\\n", " "), known))


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGQUIT if command[0].endswith("nginx") else signal.SIGKILL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    spec = RunSpec("digits", "AIDGN", "chalk", steps=3, eval_every=3, hyper_parameters={"batch_size": 8})
    return export(train(spec, folder, device="cpu"), folder / "out", onnx=False).files[0]


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = f"subjectAltName=DNS:{NAME},IP:127.0.0.1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", f"/CN={NAME}", "-addext", names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    port, secure_port = free_port(), free_port()
    letsencrypt = f"/etc/letsencrypt/live/{NAME}"
    values = {
        "listen 443 ssl": f"listen 127.0.0.1:{secure_port} ssl",
        f"{letsencrypt}/fullchain.pem": certificate,
        f"{letsencrypt}/privkey.pem": key,
        "127.0.0.1:8000": f"127.0.0.1:{port}",
    }
    (folder / "site.conf").write_text(replaced((FILES / "nginx.conf").read_text(), values))
    parts = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{part}_temp_path {folder}/{part};" for part in parts)
    (folder / "nginx.conf").write_text(
        MAIN.format(user="user root;" if os.getuid() == 0 else "", folder=folder, paths=paths)
    )
    environment = {
        "AIDGN_TOKEN": TOKEN,
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    context = ssl.create_default_context(cafile=str(certificate))
    with (
        running(service_command(model, port), env=environment, cwd=folder) as process,
        running([nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")]) as proxy,
    ):
        wait_for(f"http://127.0.0.1:{port}/api/health", process)
        wait_for(f"https://127.0.0.1:{secure_port}/aidgn/api/health", proxy, context)
        url = f"https://127.0.0.1:{secure_port}/aidgn"
        yield Site(url, f"http://127.0.0.1:{port}", process, context)


def post(client: httpx.Client, number: int = 0, **headers: str) -> httpx.Response:
    files = {"images": ("a.png", encoded(DIGITS.pixels[number]))}
    return client.post("/api/predict", files=files, headers=headers)


def test_programs_through_nginx(site: Site) -> None:
    port = httpx.URL(site.url).port
    with site.client(headers={**BEARER, "Host": f"{NAME}:{port}"}) as client:
        assert post(client).status_code == 200
        assert post(client, Origin=f"https://{NAME}:{port}").status_code == 200
        for foreign in (
            {"Origin": f"http://{NAME}:{port}"},
            {"Origin": "https://evil.example"},
            {"Host": "evil.example"},
        ):
            assert post(client, **foreign).status_code == 403
        assert post(client, Authorization="Bearer wrong").status_code == 401
        too_large = client.post("/api/predict", files={"images": bytes(32_500_000)})
        assert too_large.status_code == 413 and "32 MB" in too_large.json()["error"]["message"]
        metrics = client.get("/metrics").text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.labels.get("status", "200") == "200" and sample.labels.get("class") is None
    }
    assert found["aidgn_predict_requests_total"] >= 2 and found["aidgn_predict_seconds_count"] >= 6
    assert found["aidgn_working"] == 0 and found["process_resident_memory_bytes"] > 1e8


def test_nginx_replaces_what_clients_say_about_themselves(site: Site) -> None:
    with site.client(headers=BEARER) as client:
        origin = f"https://{httpx.URL(site.url).netloc.decode()}"
        assert post(client, **{"X-Forwarded-Proto": "http", "Origin": origin}).status_code == 200


def test_a_proxy_may_keep_many_connections(site: Site) -> None:
    """Other clients lose idle connections beyond 256."""
    port = httpx.URL(site.direct).port
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
        time.sleep(1.2)
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert httpx.get(f"{site.direct}/api/health").status_code == 200
        for connection in opened:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # neither an answer nor an end
                connection.recv(1)


def test_a_browser_through_nginx(site: Site, browser: Any, tmp_path: Path) -> None:
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    answer = page.goto(f"{site.url}/")
    assert answer.status == 401
    page.fill("input[name=token]", "wrong")
    page.click("button")
    page.fill("input[name=token]", TOKEN)
    page.click("button")
    page.wait_for_function("() => document.title.includes('aidgn') && document.getElementById('drop')")
    assert page.url == f"{site.url}/"
    [cookie] = context.cookies()
    assert cookie["secure"] and cookie["httpOnly"] and cookie["path"] == "/aidgn"
    files = [tmp_path / name for name in ("=1+1.png", 'a, "b".png')]
    for number, file in enumerate(files):
        file.write_bytes(encoded(DIGITS.pixels[number]))
    page.set_input_files("#files", files)
    page.wait_for_function("() => document.querySelectorAll('.result .label').length === 2")
    with page.expect_download() as download:
        page.click("#save")
    table = tmp_path / "table.csv"
    download.value.save_as(table)
    check_table(table, page.locator(".result .label").all_inner_texts()[::-1])
    context.close()
    assert not complaints


def check_table(table: Path, labels: list[str]) -> None:
    text = table.read_bytes()
    assert text.startswith(b"\xef\xbb\xbf")
    rows = list(csv.DictReader(text.decode("utf-8-sig").splitlines()))
    assert sorted(row["file"] for row in rows) == ["'=1+1.png", 'a, "b".png']
    assert sorted(row["label"] for row in rows) == sorted(labels)
    assert all(0 <= float(row["probability"]) <= 1 for row in rows)


def test_the_service_stops_after_its_requests(site: Site) -> None:
    """Last: SIGTERM, which systemd sends, lets a request that is being sent finish."""
    host, port = httpx.URL(site.direct).host, httpx.URL(site.direct).port
    files = {"images": ("a.png", encoded(DIGITS.pixels[0]))}
    request = httpx.Request("POST", f"{site.direct}/api/predict", files=files, headers=BEARER)
    body = request.read()
    header = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(f"POST /api/predict HTTP/1.1\r\n{header}\r\n".encode() + body[:-10])
        time.sleep(0.5)
        site.process.terminate()
        time.sleep(1.5)
        with pytest.raises(OSError):
            socket.create_connection((host, port), timeout=5).close()
        connection.sendall(body[-10:])
        answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 200")
    assert site.process.wait(20) == 0


def test_systemd_accepts_the_service() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    service = FILES / "aidgn.service"
    result = subprocess.run(["systemd-analyze", "verify", service], capture_output=True, text=True)
    complaints = [line for line in result.stderr.splitlines() if "/opt/aidgn/bin/aidgn is not executable" not in line]
    assert not [line for line in complaints if "aidgn" in line], result.stderr
