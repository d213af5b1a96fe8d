"""What a check says of the sandbox before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_project import Project, make_project

CODE = "roles.reward={function: megappo.rewards.code, timeout_s: 10}"
SERVER = "roles.reward.sandbox={kind: http, url: 'https://host:8080/run_code'}"
ADDRESS = "kind http needs the address of a SandboxFusion server's run_code, as http://host:8080/run_code"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PATH", str(tmp_path))  # no bwrap
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.reward.sandbox.kind=http"], f"roles.reward.sandbox.url: missing: {ADDRESS}"),
        (
            ["roles.reward.sandbox={kind: http, url: 'host:8080'}"],
            f"roles.reward.sandbox.url: host:8080: {ADDRESS}",
        ),
        (
            ["roles.reward.sandbox.url=http://host/run_code"],
            "roles.reward.sandbox.url: http://host/run_code is not used by kind local: set kind to http, or leave the "
            "url out",
        ),
        (
            [CODE, SERVER, "roles.reward.timeout_s=5"],
            "roles.reward.sandbox.timeout_s: 5 s for one program is not less than the 5 s of roles.reward.timeout_s "
            "for all programs of a response: lower it, or raise that",
        ),
    ],
)
def test_errors(project: Project, overrides: list[str], message: str) -> None:
    assert project.report(*overrides).errors == (message,)


def test_a_machine_without_bubblewrap(project: Project) -> None:
    (warning,) = project.report(CODE).warnings
    assert warning.startswith("roles.reward.sandbox.kind: local needs bubblewrap, and this machine has no bwrap")
    assert project.report(CODE, SERVER).warnings == ()
    assert project.report("roles.reward.timeout_s=1").warnings == ()  # a reward that runs no code
