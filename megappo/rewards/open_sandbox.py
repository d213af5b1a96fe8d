"""The sandbox of a configuration."""

from __future__ import annotations

from megappo.rewards.sandbox import Limits, Sandbox, SandboxError
from megappo.rewards.sandbox_http import HttpSandbox
from megappo.rewards.sandbox_local import LocalSandbox


def open_sandbox(
    kind: str = "local",
    url: str | None = None,
    timeout_s: float = Limits.timeout_s,
    memory_mb: int = Limits.memory_mb,
    processes: int = Limits.processes,
    output_kb: int = Limits.output_kb,
) -> Sandbox:
    """The sandbox that `roles.reward.sandbox` describes, tried once.

    Raises:
        SandboxError: this machine cannot isolate, or the server does not answer.
    """
    limits = Limits(timeout_s, memory_mb, processes, output_kb)
    if kind == "local":
        return LocalSandbox(limits)
    if kind == "http" and url:
        return HttpSandbox(url, limits)
    raise SandboxError(
        f"roles.reward.sandbox: kind {kind!r} with url {url!r}: give kind: local, or kind: http and "
        "url: http://HOST:8080/run_code"
    )
