"""Code that a model wrote, run by a server that takes SandboxFusion's `run_code` requests.

The form is that of https://github.com/bytedance/SandboxFusion, which verl's code rewards speak too. Isolation is the
server's business.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from megappo.rewards.sandbox import Limits, Run, SandboxError, too_late, too_much_output

ATTEMPTS = 3
FIRST_PAUSE_S = 0.2  # doubled each time
PASSING = (429, 500, 502, 503, 504)  # HTTP codes of a server that is busy, starting or behind a gateway
GRACE_S = 5.0  # for the server to queue, start and answer, on top of the program's time


class HttpSandbox:
    """Programs on the server at `url`, such as `http://host:8080/run_code`.

    Raises:
        SandboxError: the server does not run a program that prints one word.
    """

    def __init__(self, url: str, limits: Limits):
        self.url = url
        self.limits = limits
        trial = self.run('print("ready")')
        if trial.stdout != "ready\n":
            raise self._error(f"a trial program that prints 'ready' printed {trial.stdout[:80]!r} {trial.failure}")

    def run(self, code: str, stdin: str = "") -> Run:
        answer = self._post(
            {
                "code": code,
                "language": "python",
                "stdin": stdin,
                "run_timeout": self.limits.timeout_s,
                "compile_timeout": self.limits.timeout_s,
                "memory_limit_MB": self.limits.memory_mb,
            }
        )
        status, result = answer.get("status"), answer.get("run_result")
        if status not in ("Success", "Failed") or not isinstance(result, dict):
            raise self._error(f"answered status {status!r}: {str(answer.get('message', ''))[:200]!r}")
        stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
        failure = ""
        if len(stdout) + len(stderr) > self.limits.output_kb * 1024:
            failure = too_much_output(self.limits)
        elif result.get("status") == "TimeLimitExceeded":
            failure = too_late(self.limits)
        elif status == "Failed" or result.get("return_code"):
            failure = f"exited with code {result.get('return_code')}"
        return Run(stdout, stderr, failure)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer; what may pass is tried again."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        most = 16 * self.limits.output_kb * 1024 + 65536  # a character is up to 12 in JSON
        problem = ""
        for attempt in range(ATTEMPTS):
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) if attempt else 0)
            try:
                with urllib.request.urlopen(request, timeout=self.limits.timeout_s + GRACE_S) as response:
                    return self._parse(response.read(most))
            except urllib.error.HTTPError as error:
                problem = f"answered HTTP {error.code}"
                if error.code not in PASSING:
                    break
            except OSError as error:  # refused, reset, timed out
                problem = f"does not answer ({getattr(error, 'reason', error)})"
        raise self._error(problem)

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(f"answered no JSON object but {text[:80]!r}")
        return answer

    def _error(self, problem: str) -> SandboxError:
        return SandboxError(
            f"roles.reward.sandbox.url: {self.url} {problem}; start a SandboxFusion server there, or give the whole "
            "address of another's run_code, as http://host:8080/run_code"
        )
