"""What counts as code and as a passed test; and the form in which a server is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megappo.config import SandboxConfig
from megappo.rewards import sandbox_http
from megappo.rewards.code import compute_score, extract_code, parse_cases
from megappo.rewards.open_sandbox import open_sandbox
from megappo.rewards.sandbox import Limits, Run, SandboxError

Answer = dict[str, Any] | str | int


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n\nprint(3)\n```", "print(2)\n\nprint(3)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),  # the output is no code
        ("```\nprint(1)\n```\n```bash\nls\n```", "print(1)\n"),
        ("```Python title\nprint(1)\n```", "print(1)\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\n"),
        ("```python\nprint(1)\n```\n```python\nprint(", "print(1)\n"),  # cut off
        ("```python\n```", "\n"),
        ("print(1)", None),
        ("```python\nprint(1)", None),
        ("```cpp\nmain();\n```", None),
        ("", None),
    ],
)
def test_the_last_closed_python_block(response: str, code: str | None) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1  \n2\r\n\n", "1\n2\n", True),
        ("1\n2", ["1", "2"], True),
        ("3", 3, True),
        ("", "", True),
        (" 1", "1", False),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1  2", False),
        ("1.0", "1", False),
    ],
)
def test_white_space_at_the_ends_of_lines_and_text(printed: str, expected: Any, same: bool) -> None:
    (case,) = parse_cases("", json.dumps({"inputs": [""], "outputs": [expected]}))
    assert case.passes(printed) is same


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ('{"inputs": ["1"], "outputs": []}', "inputs and outputs are no lists of one length"),
        ('{"inputs": [], "outputs": []}', "has no test"),
        ('{"input": ["1"]}', "is no test: give JSON with inputs and outputs"),
        ("[]", "has no test"),
        ('["assert True", ""]', "is no test"),
        ("72", "is no test"),
        ("", "is no test"),
    ],
)
def test_bad_ground_truths_are_named(truth: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cases("", truth)


class Scripted:
    """A sandbox that gives one answer after the other."""

    limits = Limits()

    def __init__(self, *runs: Run):
        self.runs = list(runs)

    def run(self, code: str, stdin: str = "") -> Run:
        return self.runs.pop(0)


def test_all_or_nothing_beside_the_fraction() -> None:
    truth = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]})
    runs = [Run("1", "", ""), Run("9", "", ""), Run("3", "", "exited with code 1"), Run("4", "", "")]
    sandbox = Scripted(*runs)
    result = compute_score("code", "```python\n```", truth, sandbox=sandbox)
    assert result == {"score": 0.0, "acc": 0.0, "passed": 0.5, "format": 1.0}
    assert compute_score("code", "4", truth, sandbox=sandbox) == dict.fromkeys(result, 0.0)  # nothing was run


def test_one_timeout_is_enough() -> None:
    truth = json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]})
    sandbox = Scripted(Run("1", "", ""), Run("", "", "timeout after 5 s"))
    assert compute_score("code", "```python\n```", truth, sandbox=sandbox)["passed"] == pytest.approx(1 / 3)


class Server:
    """Answers requests by `answer`: a JSON object, a text, or an HTTP code."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda request: finished("ready\n")
        self.requests: list[dict[str, Any]] = []

    def url(self, http: ThreadingHTTPServer) -> str:
        return f"http://127.0.0.1:{http.server_port}/run_code"


def finished(stdout: str, code: int = 0, status: str = "Finished") -> dict[str, Any]:
    """SandboxFusion's answer (sandbox/server/sandbox_api.py and sandbox/runners/types.py there)."""
    return {
        "status": "Success" if status == "Finished" and code == 0 else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": status, "execution_time": 0.02, "return_code": code, "stdout": stdout, "stderr": "",
        },
        "executor_pod_name": None,
        "files": {},
    }  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, str]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sandbox_http, "FIRST_PAUSE_S", 0.01)
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append({"path": self.path, **request})
            answer = server.answer(request)
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *anything: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server, server.url(http)
        http.shutdown()
        thread.join()


def test_a_server_is_asked_in_sandboxfusions_form(server: tuple[Server, str]) -> None:
    told, url = server
    sandbox = open_sandbox("http", url, timeout_s=3, memory_mb=256)
    told.answer = lambda request: finished(str(int(request["stdin"]) * 2) + "\n")
    truth = json.dumps({"inputs": ["1", "4"], "outputs": ["2", "8"]})
    assert compute_score("code", "```python\nx\n```", truth, sandbox=sandbox)["score"] == 1.0
    assert told.requests[-1] == {
        "path": "/run_code",
        "code": "x\n",
        "language": "python",
        "stdin": "4",
        "run_timeout": 3,
        "compile_timeout": 3,
        "memory_limit_MB": 256,
    }


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (finished("", status="TimeLimitExceeded"), "timeout after 5 s"),
        (finished("2", code=1), "exited with code 1"),
        (finished("2" * 65537), "more than 64 kB of output"),
        (finished("2"), ""),
    ],
)
def test_what_the_program_did(server: tuple[Server, str], answer: Answer, failure: str) -> None:
    told, url = server
    sandbox = open_sandbox("http", url)
    told.answer = lambda request: answer
    assert sandbox.run("print(2)").failure == failure


@pytest.mark.parametrize(
    ("answer", "message", "requests"),
    [
        ({"status": "SandboxError", "message": "no pods"}, "answered status 'SandboxError': 'no pods'", 1),
        ({"status": "Success"}, "answered status 'Success'", 1),
        ({"detail": "?"}, "answered status None", 1),
        ("<html>", "answered no JSON object but b'<html>'", 1),
        ("[]", "answered no JSON object", 1),
        (404, "answered HTTP 404; .*give the whole address", 1),
        (422, "answered HTTP 422", 1),
        (503, "answered HTTP 503", 3),
    ],
)
def test_a_server_that_fails_is_named(server: tuple[Server, str], answer: Answer, message: str, requests: int) -> None:
    told, url = server
    sandbox = open_sandbox("http", url)
    told.requests.clear()
    told.answer = lambda request: answer
    with pytest.raises(SandboxError, match=f"{url} {message}"):
        sandbox.run("print(2)")
    assert len(told.requests) == requests


def test_a_busy_server_is_asked_again(server: tuple[Server, str]) -> None:
    told, url = server
    told.answer = lambda request: 503 if len(told.requests) < 3 else finished("ready\n")
    assert open_sandbox("http", url).run("").stdout == "ready\n"


def test_a_server_that_is_silent_or_absent(server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    told, url = server
    monkeypatch.setattr(sandbox_http, "GRACE_S", 0.1)
    sandbox = open_sandbox("http", url, timeout_s=0.1)
    over = threading.Event()
    told.answer = lambda request: finished(str(over.wait(5)))
    with pytest.raises(SandboxError, match=r"does not answer .*timed out"):
        sandbox.run("")
    over.set()
    with pytest.raises(SandboxError, match=r"http://127.0.0.1:1/run_code does not answer .*refused"):
        open_sandbox("http", "http://127.0.0.1:1/run_code")


def test_a_server_that_runs_nothing_is_refused(server: tuple[Server, str]) -> None:
    told, url = server
    told.answer = lambda request: finished("hello")
    with pytest.raises(SandboxError, match="trial program that prints 'ready' printed 'hello'"):
        open_sandbox("http", url)


def test_the_config_and_the_sandbox_agree() -> None:
    limits = SandboxConfig()
    assert Limits(limits.timeout_s, limits.memory_mb, limits.processes, limits.output_kb) == Limits()
    with pytest.raises(SandboxError, match="kind 'http' with url None: give"):
        open_sandbox("http")
