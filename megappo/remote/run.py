"""The remote side of a run, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megappo.check.findings import Advice
from megappo.checkpoints import Checkpoints
from megappo.config import RunConfig
from megappo.remote.down import bring_down, refuse_overlap
from megappo.remote.folder import RemoteError, RemoteFolder
from megappo.remote.uploads import Uploads
from megappo.report.console import Console


class OtherRun(ValueError):
    """What came down cannot be gone on with; ``problems`` has a text for each reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class RemoteSide:
    """Of a run whose folder is a URL; nothing at all of any other.

    A newer checkpoint comes down at once; nothing goes up, and the URL stays whose it is, until :meth:`start`.

    Args:
        run: the configuration; its working folder is locked.
        checkpoints: of the run. A newer one that is complete at the URL comes down, with the logs.
        console: tells a person.
        findings: what ``megappo check`` has to say of what is in the working folder.

    Raises:
        RemoteError: the URL cannot be written or read, is the working folder, or has another run than that.
        OtherRun: what came down is of a run that this one cannot go on with.
    """

    def __init__(
        self, run: RunConfig, checkpoints: Checkpoints, console: Console, findings: Callable[[], Iterable[str]]
    ) -> None:
        self._run, self._checkpoints, self._console = run, checkpoints, console
        self._remote: RemoteFolder | None = None
        self._uploads: Uploads | None = None
        if not run.is_remote:
            return
        refuse_overlap(run.dir, run.folder)
        self._remote = RemoteFolder.reached(run.dir)
        try:
            came = bring_down(self._remote, checkpoints, console.status, console.warn)
        except OSError as error:
            raise RemoteError(f"run.dir: {run.dir} could not come down ({type(error).__name__}: {error})") from error
        if came and (problems := [line for line in findings() if not isinstance(line, Advice)]):
            raise OtherRun(problems)

    def start(self) -> None:
        """Take the URL, and send from now on until :meth:`close`: once nothing keeps the run from going on."""
        if self._remote is not None:
            self._uploads = Uploads(self._run.folder, self._remote, self._checkpoints, self._console.warn)

    def tell(self) -> None:
        """Tell what happened in the background."""
        if self._uploads is not None:
            self._uploads.tell()

    def close(self) -> None:
        """Wait until everything is up, or for ``run.upload_timeout_s``."""
        if self._uploads is not None:
            self._uploads.close(self._run.upload_timeout_s, self._console.status)
            self._uploads = None
