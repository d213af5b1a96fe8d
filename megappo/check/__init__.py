"""Everything about a run that can be known before it starts. No torch, Ray, vLLM or transformers is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.check.algorithm import ppo_findings, sampling_findings
from megappo.check.data import data_findings, length_findings, replay_findings
from megappo.check.findings import Absent, Advice, Lacking, on_files
from megappo.check.guards import best_findings, guard_findings
from megappo.check.layouts import layout_findings, memory_findings, pool_findings
from megappo.check.memory import fit_findings, scoring_fit_findings
from megappo.check.models import end_of_text_findings, model_findings
from megappo.check.overlap import overlap_findings
from megappo.check.rewards import reward_findings, reward_model_findings, reward_time_findings, sandbox_findings
from megappo.check.run_folder import run_findings
from megappo.check.unused import unused_findings
from megappo.config import Config, ConfigError, load_config
from megappo.models.spec import ModelSpec


@dataclass(frozen=True)
class Report:
    """What a check found: lines of the form ``key: value, why: fix``. Errors stop a run; warnings do not."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def check_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    planning: bool = False,
    elsewhere: bool = False,
    scoring: bool = False,
) -> tuple[Config | None, Report]:
    """Load and check a configuration file, so that mistakes in the file and in what it names come out together.

    Returns the configuration (None if it has errors that keep it from being read) and the findings.

    Args:
        planning: files that a run needs may be missing (weights, tokenizer, data, rewards), which is a warning then.
        elsewhere: the run will be on machines with files of their own: so may whole model folders.
        scoring: nothing trains, so that it does not matter what is in the run folder, nor what training would take.
    """
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        rest = Report()
        if error.partial:
            rest = check(error.partial, planning=planning, elsewhere=elsewhere, scoring=scoring)
        return None, Report((*error.problems, *error.news(rest.errors)), error.news(rest.warnings))
    return config, check(config, planning=planning, elsewhere=elsewhere, scoring=scoring)


def check(config: Config, *, planning: bool = False, elsewhere: bool = False, scoring: bool = False) -> Report:
    """Check a configuration against itself, its model folders, its files and its run folder."""
    findings = [] if scoring else list(on_files(run_findings(config)))
    findings += _findings(config)
    mild: tuple[type[str], ...] = (Advice, Lacking) if planning or elsewhere else (Advice,)
    if not planning and all(isinstance(line, mild) for line in findings):
        findings += scoring_fit_findings(config) if scoring else fit_findings(config)
    if elsewhere:
        mild += (Absent,)
    errors = tuple(str(line) for line in findings if not isinstance(line, mild))
    return Report(errors, tuple(str(line) for line in findings if isinstance(line, mild)))


def _findings(config: Config) -> Iterator[str]:
    specs: dict[str, ModelSpec] = {}
    yield from model_findings(config, specs)
    yield from on_files(end_of_text_findings(config, specs))
    yield from on_files(data_findings(config))
    yield from on_files(replay_findings(config))
    yield from pool_findings(config)
    yield from layout_findings(config, specs)
    yield from length_findings(config, specs)
    yield from on_files(reward_findings(config))
    yield from on_files(reward_model_findings(config))
    yield from sandbox_findings(config)
    yield from reward_time_findings(config)
    yield from memory_findings(config, specs)
    yield from sampling_findings(config)
    yield from ppo_findings(config)
    yield from guard_findings(config)
    yield from overlap_findings(config)
    yield from best_findings(config)
    yield from unused_findings(config)
