"""The check of a run folder that holds a checkpoint: what may change and what may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_project import Project, make_project, write_model

from megappo.check import Report, check_file
from megappo.config import dump_config, load_config


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def _begin_run(project: Project, step: int) -> None:
    checkpoint = project.folder / f"run/checkpoints/step_{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "trainer.json").write_text("{}")
    (project.folder / "run/config.yaml").write_text(dump_config(load_config("config.yaml")))


def test_resuming(project: Project) -> None:
    _begin_run(project, step=5)
    assert project.report() == Report()
    assert project.report("roles.actor={pool: train, tp: 4}", "ppo.actor_lr=1e-5", "run.steps=20") == Report()
    assert project.report(f"model={project.folder}/model") == Report(), "the same folder by another path"
    assert project.report("run.seed=2", "ppo.mini_batch=8", "data.train=[validation.parquet]").errors == (
        "run.seed: 2 differs from 1, with which the run in run began: set it back, or choose another run.dir",
        "data.train: validation.parquet differs from train.parquet, with which the run in run began: "
        "set it back, or choose another run.dir",
        "ppo.mini_batch: 8 differs from 16, with which the run in run began: set it back, or choose another run.dir",
    )
    assert project.report("roles.actor.lora.rank=4").errors == (
        "roles.actor.lora: {rank: 4, alpha: 32.0, targets: all-linear} differs from null, with which the run in run "
        "began: set it back, or choose another run.dir",
    )
    assert project.report("run.steps=5").warnings == (
        "run.steps: 5 steps are done, as run has a checkpoint of step 5: raise run.steps, or choose another run.dir",
    )
    (project.folder / "run/checkpoints/step_5/trainer.json").write_text('{"step": 5, "unvalidated": {}}')
    assert project.report("run.steps=5") == Report(), "the last validation is still to come"


def test_scoring_is_none_of_the_run_s_business(project: Project) -> None:
    """The trained actor may be scored by the configuration that its run had."""
    _begin_run(project, step=10)
    write_model(project.folder / "trained")
    overrides = ("roles.actor.model=trained",)
    assert len(project.report(*overrides).errors) == len(project.report(*overrides).warnings) == 1
    assert check_file("config.yaml", overrides, scoring=True)[1] == Report()


def test_scoring_is_not_measured_by_what_training_takes(project: Project) -> None:
    numbers = "matrix_tflops: 700, memory_gb_s: 4000, host_gb_s: 50, node_gb_s: 300, network_gb_s: 40"
    overrides = ("run.device=cuda", "run.device_profile=small.yaml", "roles.rollout.memory_fraction=0.02")
    Path("small.yaml").write_text(f"{{memory_gib: 6, {numbers}}}")  # without room for an engine
    assert project.report(*overrides).warnings
    assert check_file("config.yaml", overrides, scoring=True)[1] == Report()
    Path("small.yaml").write_text(f"{{memory_gib: 0.6, {numbers}}}")
    found = [line.split(" needs ")[0] for line in check_file("config.yaml", overrides, scoring=True)[1].warnings]
    assert found == ["pools.train: scoring by the actor", "pools.value: scoring by the reference"]


def test_resuming_with_another_model(project: Project) -> None:
    _begin_run(project, step=5)
    write_model(project.folder / "other")
    at, rest = project.folder, "with which the run in run began: set it back, or choose another run.dir"
    assert project.report("model=other").errors == (f"model: {at}/other differs from {at}/model, {rest}",)
    assert project.report("roles.actor.model=./model") == Report(), "the one that it had"
    assert project.report("roles.reference=null", "ppo.kl.in_reward=false") == Report()
    for role in ("actor", "critic", "reference"):
        assert project.report(f"roles.{role}.model=other").errors == (
            f"roles.{role}.model: {at}/other differs from {at}/model, {rest}",
        )
    project.edit("critic: {pool", "critic: {model: other, pool")
    assert project.report().errors == (f"roles.critic.model: {at}/other differs from {at}/model, {rest}",)
    _begin_run(project, step=5)
    assert project.report() == Report()


def test_mixtures_of_experts_are_not_trained_yet(project: Project) -> None:
    write_model(project.folder / "experts", model_type="mixtral", num_local_experts=2)
    assert project.report("model=experts").errors == (
        f"model: {project.folder}/experts is a mixture of experts (mixtral), which can be planned and converted but "
        "not yet trained: give a dense model",
    )


def test_resuming_with_another_number_of_steps(project: Project) -> None:
    project.edit("critic_lr: 1e-5", "critic_lr: 1e-5, optimizer: {schedule: cosine}")
    _begin_run(project, step=5)
    assert project.report() == Report()
    assert project.report("run.steps=20", "ppo.optimizer.schedule=constant") == Report()
    assert project.report("run.steps=20").warnings == (
        "run.steps: 20 differs from 10, with which the run in run went on so far: the learning rate jumps, as the "
        "cosine schedule ends at the last step (a constant one does not)",
    )


def test_run_without_a_checkpoint_may_change(project: Project) -> None:
    _begin_run(project, step=5)
    (project.folder / "run/checkpoints/step_5").rename(project.folder / "run/checkpoints/step_5.partial")
    assert project.report("run.seed=2") == Report()


def test_unreadable_stored_configuration(project: Project) -> None:
    _begin_run(project, step=5)
    (project.folder / "run/config.yaml").unlink()
    assert project.report().errors == (
        "run.dir: run holds checkpoints of a run that cannot be read "
        "(run/config.yaml: no such file: give the path of a YAML file): choose another",
    )
