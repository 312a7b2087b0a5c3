"""aidgn serve as people use it: in a real browser, from programs, and from fifty of them at once."""

import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image

from aidgn.data import load_dataset
from aidgn.inference import load_model
from aidgn.new_site.confidence import Outputs, UnseenSite
from aidgn.new_site.expectations import measure
from aidgn.new_site.shift import SiteReference
from aidgn.novelty import to_array
from aidgn.runs.checkpoints import write_values
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, train
from tests.conftest import Tally

DIGITS = load_dataset("digits")


class Server(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    said: list[str]  # on standard error

    def memory(self) -> int:
        """The most that its processes ever held, in MB."""
        processes = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parents = {int(pid): int(parent) for pid, parent in (line.split() for line in processes.splitlines())}
        most = 0
        for pid in parents:
            lineage = [pid]
            while parents.get(lineage[-1]):
                lineage.append(parents[lineage[-1]])
            if self.process.pid in lineage:
                status = Path(f"/proc/{pid}/status").read_text()
                most += int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) // 1000
        return most


@contextmanager
def served(run: Path, *options: str, **environment: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "aidgn", "serve", str(run), "--port", "0", "--device", "cpu", *options]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=run.parent,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    ) as process:
        said: list[str] = []
        try:
            assert process.stderr
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"at (http://[^/\s]+)/", line):
                    for _ in range(300):
                        try:
                            httpx.get(f"{found[1]}/api/health")
                            break
                        except httpx.TransportError:
                            time.sleep(0.1)
                    yield Server(process, found[1], said)
                    break
            else:
                raise AssertionError("".join(said))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RunSpec("digits", "AIDGN", "chalk", steps=30, eval_every=30, hyper_parameters={"batch_size": 16})
    return train(spec, tmp_path_factory.mktemp("runs"), device="cpu")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with served(run, "--map", "60") as server:
        assert len(server.said) == 1  # on this machine alone: no warning
        yield server


def encoded(picture: np.ndarray | Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(file, form)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A whole PNG of side x side black pixels, three hundred times as large as the file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    packer = zlib.compressobj()
    packed = b"".join(packer.compress(bytes(1 + 3 * side)) for _ in range(side)) + packer.flush()
    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def send(server: Server, *files: tuple[str, bytes], **headers: str) -> httpx.Response:
    parts = [("images", file) for file in files]
    return httpx.post(f"{server.url}/api/predict", files=parts, headers=headers, timeout=120)


# Programs -------------------------------------------------------------------------------------------------------------


def load(server: Server, run: Path, requests: int, large: int) -> None:
    """Many requests at once, of every kind; each gets its proper answer, and memory stays bounded."""
    panorama = encoded(Image.linear_gradient("L").resize((10_000, 10_000 * large // 10)).convert("RGB"), "JPEG")
    kinds = [
        ("bomb.png", bomb(9000), 413),
        ("letter.jpg", b"Dear all,\n", 415),
        ("cut.png", encoded(DIGITS.pixels[0])[:90], 422),
        ("panorama.jpg", panorama, 200),
        ("large.png", bomb(700 * large), 200),
    ]
    labels = load_model(run, "cpu").predict(DIGITS.pixels[:requests]).labels
    before = server.memory()

    def ask(number: int) -> tuple[str, int, int]:
        if number % 2:
            name, content, wanted = kinds[number // 2 % len(kinds)]
            answer = send(server, (name, content))
        else:
            name, wanted = "digit.png", 200
            answer = send(server, (name, encoded(DIGITS.pixels[number])))
            if answer.status_code == 200:
                assert answer.json()["images"][0]["label"] == labels[number]
        if answer.status_code not in (429, 503):
            assert answer.json()["images"][0]["name"] == name
        return name, answer.status_code, wanted

    began = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(ask, range(requests)))
    took = time.monotonic() - began
    busy = Counter(status for _, status, wanted in found if status != wanted)
    assert set(busy) <= {429, 503}, Counter(found)  # too busy is a proper answer; a wrong one is not
    assert sum(busy.values()) < requests / 2, Counter(found)
    assert took < 300 and server.process.poll() is None
    assert server.memory() - before < 200 + 45 * large  # MB; fifty decoded panoramas would be 3,000 for each 10
    health = httpx.get(f"{server.url}/api/health").json()
    assert health["working"] == health["waiting"] == 0
    assert send(server, ("a.png", encoded(DIGITS.pixels[0]))).status_code == 200


def test_fifty_at_once(server: Server, run: Path) -> None:
    load(server, run, 50, large=2)


@pytest.mark.slow
def test_hundreds_with_the_largest_pictures(run: Path) -> None:
    with served(run, "--map", "60", "--max-seconds", "60") as server:
        load(server, run, 300, large=6)


def test_nobody_is_a_proxy_unasked(server: Server) -> None:
    headers = {"X-Forwarded-Proto": "https", "Origin": server.url.replace("http:", "https:")}
    assert httpx.get(f"{server.url}/api/health", headers=headers).status_code == 403


def test_clients_that_leave_or_dawdle_and_ctrl_c(run: Path, tmp_path: Path) -> None:
    with served(
        run, "--map", "0", "--host", "0.0.0.0", "--max-seconds", "2", "--max-requests", "2", TMPDIR=str(tmp_path)
    ) as server:
        assert server.process.stderr
        [phone] = re.findall(r"(http://\S+)/\?token=(\S+)", server.process.stderr.readline())
        assert "not encrypted" in server.process.stderr.readline()
        for address in (server.url, phone[0]):
            assert httpx.get(f"{address}/api/model").status_code == 401
            assert httpx.get(address, params={"token": "wrong"}).status_code == 401
        with httpx.Client(base_url=phone[0], follow_redirects=True) as client:
            assert client.get("/", params={"token": phone[1]}).url == f"{phone[0]}/"
            assert client.get("/api/model").json()["map"] is None
        bearer = {"Authorization": f"Bearer {phone[1]}"}
        port = server.url.rpartition(":")[2]
        head = (
            f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 100000\r\n"
            f"Authorization: bearer {phone[1]}\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        ).encode()
        for _ in range(5):  # more than may be in work: they must not stay in it
            with socket.create_connection(("127.0.0.1", int(port))) as leaver:
                leaver.sendall(head)
        with socket.create_connection(("127.0.0.1", int(port)), timeout=120) as dawdler:
            dawdler.sendall(head)
            assert send(server, ("a.png", encoded(DIGITS.pixels[0])), **bearer).status_code == 200
            answer = b""
            while b"}}" not in answer and (part := dawdler.recv(4096)):
                answer += part
            assert answer.startswith(b"HTTP/1.1 408") and b"not complete after 2 seconds" in answer
        health = httpx.get(f"{server.url}/api/health").json()
        assert (health["working"], health["waiting"]) == (0, 0)

        taken = subprocess.run(
            [sys.executable, "-m", "aidgn", "serve", run, "--port", port], capture_output=True, text=True
        )
        assert taken.returncode == 2 and f"Port {port} of 127.0.0.1 cannot be used" in taken.stderr

        assert len(list(tmp_path.glob("aidgn-serve-*"))) == 1
        began = time.monotonic()
        for _ in range(2):  # the second by an impatient person
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert server.process.wait(120) == 0 and time.monotonic() - began < 60
        assert server.process.stderr.read() == "Stopped.\n"
    assert not list(tmp_path.glob("aidgn-serve-*"))


def test_slow_connections_keep_nobody_out(server: Server, tally: Tally) -> None:
    """Connections that send nothing, half a header, a slow body, or read nothing."""
    port = int(server.url.rpartition(":")[2])
    header = f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode()
    body = b"Content-Length: 100000\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    deaf = f"GET /api/model HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 50
    digit = encoded(DIGITS.pixels[0])
    assert send(server, ("a.png", digit)).status_code == 200  # the first one starts a process that decodes
    with ExitStack() as stack:

        def connect(content: bytes) -> socket.socket:
            connection = stack.enter_context(socket.socket())
            if content is deaf:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", port))
            connection.sendall(content)
            return connection

        began = time.monotonic()
        contents = (b"", header, header + body, deaf)
        opened = [(content, connect(content)) for _ in range(75) for content in contents]
        seconds = []
        for _ in range(8):
            asked = time.monotonic()
            with tally("page among 300 slow connections, within a second"):
                assert httpx.get(server.url).status_code == 200
                assert time.monotonic() - asked < 1
            asked = time.monotonic()
            with tally("prediction among 300 slow connections, within a second"):
                assert send(server, ("a.png", digit)).status_code == 200
                assert time.monotonic() - asked < 1
            seconds.append(time.monotonic() - began)
            time.sleep(0.2)
        assert seconds[0] < 5  # while all of them are open
        for content, connection in opened:
            with tally("slow connections that end"):
                answer = b""
                while part := connection.recv(65536):
                    answer += part
                if content is deaf:
                    assert answer.startswith(b"HTTP/1.1 200")
                else:
                    assert answer.startswith((b"HTTP/1.1 408", b"HTTP/1.1 429")) or not content + answer
        assert time.monotonic() - began < 40
        invalid = connect(b"nonsense\r\n\r\n")
        status, _, text = b"".join(iter(lambda: invalid.recv(4096), b"")).partition(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 400") and json.loads(text)["error"]["status"] == 400
        assert httpx.get(f"{server.url}/api/health").json() == {"status": "ok", "working": 0, "waiting": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="needs many loopback addresses")
def test_slow_senders_with_many_addresses(server: Server, tally: Tally) -> None:
    """More than there are places for, and so new that nobody knows yet that they are slow."""
    port = int(server.url.rpartition(":")[2])
    header = (
        f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    ).encode()
    digit = encoded(DIGITS.pixels[0])
    with ExitStack() as stack:
        for number in range(150):
            source = (f"127.0.1.{number + 1}", 0)
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=source))
            slow.sendall(header)
        for _ in range(4):
            with tally("prediction among 150 slow senders with as many addresses"):
                assert send(server, ("a.png", digit)).status_code == 200


def test_refused_bodies_end(server: Server, tally: Tally) -> None:
    """A client that goes on sending after its answer is cut off."""
    port = int(server.url.rpartition(":")[2])
    header = f"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 100000000\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as endless, tally("bodies that drip after a 404"):
        endless.sendall(header)
        assert endless.recv(4096).startswith(b"HTTP/1.1 404")
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < 60:
                endless.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 30


def test_eight_endless_uploads_delay_nobody(server: Server, tally: Tally) -> None:
    """Uploads at the minimum rate, as many as requests are classified at a time."""
    port = int(server.url.rpartition(":")[2])
    header = (
        f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 30000000\r\n"
        'Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\nContent-Disposition: form-data; name="images"; '
        'filename="a.png"\r\n\r\n'
    ).encode()
    digit = encoded(DIGITS.pixels[0])
    with ExitStack() as stack:
        endless = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        for connection in endless:
            connection.sendall(header)
        for _ in range(8):
            for connection in endless:
                connection.sendall(bytes(5000))
            began = time.monotonic()
            with tally("prediction during 8 endless uploads, within a second"):
                assert send(server, ("a.png", digit)).status_code == 200
                assert time.monotonic() - began < 1
            time.sleep(0.3)


def slow_picture(form: str) -> bytes:
    """A small picture of up to 31 MB, whose header or content takes seconds of computing."""
    small = Image.new("RGB", (8, 8))
    if form == "PPM":
        return b"P6\n#" + b"x" * 31_000_000 + b"\n2 2 255\n" + bytes(12)
    if form == "JPEG":
        content = encoded(small, "JPEG")
        return content[:2] + b"\xff\xfe\x00\x02" * 7_500_000 + content[2:]
    if form == "PNG":
        content = encoded(small)
        return content[:33] + (b"\0\0\0\0teSt" + zlib.crc32(b"teSt").to_bytes(4, "big")) * 2_500_000 + content[33:]
    return b"P3 2000 2000 255 " + b"11 " * 10_000_000  # numbers as text, and too few


@pytest.mark.parametrize("form", ["PPM", "JPEG", "PNG", "plain PPM"])
def test_slow_pictures_delay_nobody(form: str, server: Server, tally: Tally) -> None:
    content, digit = slow_picture(form), encoded(DIGITS.pixels[0])
    port = int(server.url.rpartition(":")[2])
    with ThreadPoolExecutor(2) as pool:
        hostile = [pool.submit(send, server, ("a.png", content)) for _ in range(2)]
        time.sleep(0.3)
        with tally("predictions during pictures that are slow to decode"):
            while not all(answer.done() for answer in hostile):
                asked = time.monotonic()
                assert send(server, ("a.png", digit)).status_code == 200
                # Fast pictures have half a second of computing, which takes longer where other programs compute.
                assert time.monotonic() - asked < 2 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
                time.sleep(0.05)
        for answer in hostile:
            with tally("pictures that are slow to decode"):
                [image] = answer.result().json()["images"]
                assert answer.result().status_code == image["error"]["status"] == 422
    leaver = socket.create_connection(("127.0.0.1", port))
    with leaver:  # its decoding ends
        request = httpx.Request("POST", f"{server.url}/api/predict", files=[("images", ("a.ppm", content))])
        header = (
            f"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {request.headers['content-type']}"
        )
        leaver.sendall(f"{header}\r\nContent-Length: {request.headers['content-length']}\r\n\r\n".encode())
        leaver.sendall(request.read())
    assert send(server, ("a.png", digit)).status_code == 200
    until = time.monotonic() + 20
    while httpx.get(f"{server.url}/api/health").json()["working"] and time.monotonic() < until:
        time.sleep(0.1)
    assert httpx.get(f"{server.url}/api/health").json() == {"status": "ok", "working": 0, "waiting": 0}


@pytest.mark.slow
def test_five_hundred_uploads_at_once(server: Server, tally: Tally) -> None:
    digit = encoded(DIGITS.pixels[0])
    noise = encoded(np.random.default_rng(0).integers(0, 256, (600, 600, 3), np.uint8))  # 1 MB
    label = send(server, ("a.png", digit)).json()["images"][0]["label"]

    def upload(number: int) -> int:
        with tally("500 uploads at once, answered 200 or 429"):
            answer = send(server, ("a.png", noise if number % 5 == 0 else digit))
            assert answer.status_code in (200, 429)
            assert (answer.json()["error"]["status"] == 429) if answer.status_code == 429 else answer.json()["images"]
            assert answer.status_code == 429 or number % 5 == 0 or answer.json()["images"][0]["label"] == label
        return answer.status_code

    with ThreadPoolExecutor(500) as pool:
        statuses = Counter(pool.map(upload, range(500)))
    assert statuses[200] >= 72  # as many as find a place
    assert send(server, ("a.png", digit)).status_code == 200


def test_a_closed_terminal_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the server would rightly stay
    try:
        with served(run, "--map", "0", TMPDIR=str(tmp_path)) as server:
            assert len(list(tmp_path.glob("aidgn-serve-*"))) == 1
            server.process.send_signal(signal.SIGHUP)
            assert server.process.wait(120) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not list(tmp_path.glob("aidgn-serve-*"))


# A browser ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page, which must neither complain nor ask anyone else for anything."""
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    found.set_default_timeout(60_000)
    complaints: list[str] = []
    found.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("dialog", lambda dialog: complaints.append(dialog.message))
    found.on(
        "request",
        lambda request: (
            None if request.url.startswith((f"{server.url}/", "blob:", "data:")) else complaints.append(request.url)
        ),
    )
    found.goto(server.url)
    yield found
    found.close()
    assert not complaints


def drop(page: Any, name: str, content: bytes) -> None:
    """Drop a file on the page as a person does."""
    transfer = page.evaluate_handle(
        """([name, content]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([Uint8Array.from(atob(content), c => c.charCodeAt(0))], name));
        return transfer;
    }""",
        [name, base64.b64encode(content).decode()],
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event("#drop", event, {"dataTransfer": transfer})


def test_dropping_a_picture(page: Any, server: Server, run: Path) -> None:
    page.wait_for_selector("#map circle")
    assert page.locator("#dots circle").count() == 60 and page.locator("#legend li").count() == 10
    drop(page, "<img src=x onerror=alert(1)>.png", encoded(DIGITS.pixels[5]))
    page.wait_for_selector(".result .label")
    wanted = load_model(run, "cpu").predict(DIGITS.pixels[5])
    [best] = wanted.top(5)
    assert page.inner_text(".result .label") == best[0][0] == wanted.labels[0]
    assert page.locator(".bars .class").all_inner_texts() == [name for name, _ in best]
    assert page.locator(".bars .share").all_inner_texts() == [f"{100 * p:.1f}%" for _, p in best]
    widths = [page.locator(".fill").nth(i).bounding_box()["width"] for i in range(5)]
    whole = page.locator(".track").first.bounding_box()["width"]
    assert np.allclose(np.array(widths) / whole, [p for _, p in best], atol=0.01)
    assert (page.locator(".warning").count() == 1) == (wanted.warnings is not None and wanted.warnings[0] is not None)
    assert page.locator("#pins .pin").count() == 1
    assert "<img src=x onerror=alert(1)>.png" in page.inner_text(".result .name")
    near = page.locator(".near li")
    assert near.count() == 6
    near.last.scroll_into_view_if_needed()
    page.wait_for_function("() => [...document.querySelectorAll('.near img')].every(i => i.complete && i.naturalWidth)")
    answer = send(server, ("a.png", encoded(DIGITS.pixels[5]))).json()["images"][0]
    for number, neighbour in enumerate(answer["nearest"]):
        assert near.nth(number).inner_text().split("\n") == [
            neighbour["class"],
            neighbour["domain"],
            f"{neighbour['distance']:.3f}",
        ]


def test_the_page_warns_of_a_new_site(browser: Any, run: Path, tmp_path: Path) -> None:
    """Beside the answers: the promise, the chance of each label, the site alarm, a heatmap on demand."""
    model = load_model(run, "cpu")
    seen = model.predict(list(DIGITS.pixels[::9]))
    random = np.random.default_rng(0)
    outputs = Outputs(random.normal(size=(60, 10)), random.integers(10, size=60), {})
    sites = random.integers(3, size=len(seen.labels))
    distances = dict.fromkeys("abc", 0.01)
    reference = SiteReference.fit(
        seen.features.numpy(), seen.logits.numpy(), to_array(model.vectors), sites, list("abc"), distances
    )
    expectations = measure([UnseenSite(s, 0, outputs, outputs) for s in "abc"], outputs, model.classes, reference)
    knowing = tmp_path / "knowing"
    shutil.copytree(run, knowing)
    write_values(RunFolder(knowing).expectations, expectations.to_dict())
    with served(knowing, "--map", "0", "--max-requests", "2") as server:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(server.url)
        page.wait_for_selector("#expected:not([hidden])")
        assert page.inner_text("#expected") == expectations.accuracies.describe()
        assert f"{100 * expectations.mean('warned'):.1f}% of the pictures" in page.inner_text("#about")
        noise = [encoded(random.integers(0, 256, (28, 28, 3), dtype=np.uint8)) for _ in range(20)]
        for number, content in enumerate(noise):
            drop(page, f"{number}.png", content)
        page.wait_for_selector("#site.warning:not([hidden])")
        assert re.match(r"The latest 20 pictures on this server\. Site alarm", page.inner_text("#site"))
        assert page.locator(".result .chance").count() == 20
        page.locator(".why").first.click()
        page.wait_for_selector('img.picture[src^="data:image/png"]')
        site = httpx.get(f"{server.url}/api/site").json()["site"]
        assert site["alarm"] and site["pictures"] == 20  # not counted twice
        page.click("#clear")
        assert page.is_hidden("#site")
        page.close()


def test_by_keyboard_and_on_a_phone(page: Any, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.reload()
    page.wait_for_selector("#map-card:not([hidden])")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        Image.fromarray(DIGITS.pixels[number * 400]).save(file)
    page.bring_to_front()
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.id") == "choose":
            break
    page.evaluate("""() => document.getElementById("files").addEventListener("click", event => {
        event.preventDefault();  // the system's own window is not for tests
        document.body.dataset.asked = "yes";
    })""")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-asked]", state="attached")
    page.set_input_files("#files", files)
    page.wait_for_function("() => document.querySelectorAll('.result .label').length === 3")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.focus("summary")  # the map, closed on a phone
    page.keyboard.press("Enter")
    page.wait_for_selector("#map-card[open]")
    assert page.locator("#map").is_visible() and page.locator("#pins .pin").count() == 3
    page.locator(".result .remove").last.focus()
    page.keyboard.press("Enter")
    assert page.locator(".result").count() == 2 and page.locator("#pins .pin").count() == 2
    page.click("#clear")
    assert page.locator(".result").count() == 0


def test_room_without_a_map_and_beside_long_names(browser: Any, server: Server) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(server.url)
    page.wait_for_selector("#map-card:not([hidden])")
    drop(page, "5.png", encoded(DIGITS.pixels[5]))
    page.wait_for_selector(".track")
    page.evaluate("""() => {
        document.getElementById("map-card").hidden = true;  // as where training images are not at hand
        for (const name of document.querySelectorAll(".bars .class")) name.textContent = "long ".repeat(20);
    }""")
    assert page.locator(".result").bounding_box()["width"] > 1000
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.locator(".track").first.bounding_box()["width"] > 30
    page.close()


def test_unreadable_picture_on_the_page(browser: Any, server: Server) -> None:
    page = browser.new_page()
    page.goto(server.url)
    drop(page, "letter.jpg", b"Dear all,\n")
    page.wait_for_selector(".error")
    assert "not a picture" in page.inner_text(".error")
    drop(page, "bomb.png", bomb(9000))
    page.wait_for_function("() => document.querySelectorAll('.error').length === 2")
    assert "too many pixels (9,000 x 9,000)" in page.inner_text(".error >> nth=0")
    page.close()


def test_help_documents_the_endpoint() -> None:
    from click.testing import CliRunner

    from aidgn.cli import app

    text = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "POST /api/predict" in text and "curl -F images=@photo.jpg" in text and "--max-megapixels" in text
    assert "a quarter of that" in " ".join(text.split())
    assert json.dumps("nearest") in text
    assert "\b" not in text and "\\x08" not in text
