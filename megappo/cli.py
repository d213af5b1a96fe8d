"""The ``megappo`` command. Each word imports what it needs only when it is used, so that ``check`` is quick."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo import __version__
from megappo.check import Report, check_file
from megappo.check.supervised import check_supervised_file
from megappo.checkpoints import NO_ROOM
from megappo.cluster.forks import Forks
from megappo.config import Config, MegatronRoleConfig, SupervisedConfig, describe_config
from megappo.config.run import is_url
from megappo.data.published import INSTRUCTIONS
from megappo.doctor.command import add_doctor
from megappo.launch.command import add_launch
from megappo.stack import check_driver
from megappo.stop_request import STOPPED, ended_by_sigterm

BAD_INPUT = 2
"""Exit status where the user's input is at fault, as argparse has it; each error is on standard error."""

MODELS = "runs/bench"
NO_MODELS = ("planning", "reshard")
"""Where benchmarks keep the models that they make, and which of them make none."""

RESUMES = "the same command goes on from the last checkpoint, or from the beginning where there is none yet"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = _parser()
    options, late = parser.parse_known_args(arguments)
    if late and not (hasattr(options, "overrides") and all("=" in one and one[0] != "-" for one in late)):
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:  # argparse does not see that overrides may come after an option too
        options.overrides = [*options.overrides, *late]
    try:
        with ended_by_sigterm():
            return options.run(options)
    except BrokenPipeError:  # the reader of our output, head for instance, has had enough
        sys.stderr.close()
        return 141
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return _refuse(f"{error.filename or 'the disk'}: {error.strerror}: make room, and give the same command", 1)
        if not type(error).__module__.startswith("megappo."):
            raise
        # Our own exceptions say in words what is wrong; a traceback through this program would only hide it.
        _print_report(Report(errors=getattr(error, "problems", (str(error),))))
        return BAD_INPUT if isinstance(error, ValueError) else 1
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != signal.SIGTERM:  # as Ray, while it starts, exits upon SIGTERM
            raise
        print(f"interrupted: {options.interrupted.format(**vars(options))}", file=sys.stderr)
        return 130


def _check(options: argparse.Namespace) -> int:
    if options.task != "train":
        given = _supervised_config(options)
        if given is not None:
            print(supervised_table(given))
        return BAD_INPUT if given is None else 0
    config, report = check_file(options.config, options.overrides)
    _print_report(report)
    if config is None or report.errors:
        return BAD_INPUT
    print(layout_table(config))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from megappo.plan.command import Options, plan

    config, report = check_file(options.config, options.overrides, planning=True)
    _print_report(report)
    if config is None or report.errors:
        return BAD_INPUT
    options.device = options.device or config.run.device_profile
    chosen = {name: value for name, value in vars(options).items() if name in Options.__dataclass_fields__}
    plan(config, Options(**chosen), print)
    return 0


def _train(options: argparse.Namespace) -> int:
    config, report = check_file(options.config, options.overrides)
    _print_report(report)
    if config is None or report.errors:
        return BAD_INPUT
    check_driver(config.run.device, workers_here=not os.environ.get("RAY_ADDRESS"))
    with Forks(config, engines=True) as forks:
        from megappo.trainer import train

        return 0 if train(config, forks) else STOPPED


def _train_on_examples(options: argparse.Namespace) -> int:
    config = _supervised_config(options)
    if config is None:
        return BAD_INPUT
    check_driver(config.run.device, workers_here=not os.environ.get("RAY_ADDRESS"))
    with Forks(config) as forks:
        from megappo.supervised import train_on_examples

        return 0 if train_on_examples(config, options.task, forks) else STOPPED


def _score(options: argparse.Namespace) -> int:
    config, report = check_file(options.config, options.overrides, scoring=True)
    _print_report(report)
    if config is None or report.errors:
        return BAD_INPUT
    check_driver(config.run.device, workers_here=not os.environ.get("RAY_ADDRESS"))
    with Forks(config) as forks:
        from megappo.score import Options, score

        chosen = Options(options.column, options.against, options.against_column)
        score(config, options.data, options.out, chosen, print, forks)
        return 0


def _supervised_config(options: argparse.Namespace) -> SupervisedConfig | None:
    """The checked configuration; None, and what is wrong on standard error, if it has errors."""
    config, errors, warnings = check_supervised_file(options.config, options.overrides, options.task)
    _print_report(Report(errors, warnings))
    return None if errors else config


def _report(options: argparse.Namespace) -> int:
    if options.watch:
        if is_url(options.run_dir):
            return _refuse(f"--watch: {options.run_dir} is a URL: give the folder in which the run works")
        from megappo.report.watch import watch

        watch(Path(options.run_dir))
        return 0
    folder = _folder_here(options.run_dir)
    if not (folder / "log.jsonl").is_file():
        return _refuse(f"{options.run_dir}: has no log.jsonl: give the folder of a run (run.dir)")
    from megappo.report.html import write_report

    try:
        print(write_report(folder))
    except ValueError as error:  # a broken line of the log
        return _refuse(str(error))
    return 0


def _arithmetic(options: argparse.Namespace) -> int:
    from megappo.data.arithmetic import write_arithmetic

    names = ("train", "validation", "digits", "operations", "seed", "chat", "word_problems")
    chosen = {name: value for name, value in vars(options).items() if name in names}
    try:
        paths = write_arithmetic(options.out, **chosen)
    except (ValueError, OSError) as error:
        return _refuse(_not_written(error, options.out))
    print(*paths, sep="\n")
    return 0


def _not_written(error: Exception, out: str) -> str:
    """Why data were not written, for the user."""
    if not isinstance(error, OSError):
        return str(error)
    if Path(out).exists() and not Path(out).is_dir():
        return f"{out}: is a file: give a folder as OUT"
    return f"{error.filename or out}: {error.strerror or error}: give a folder as OUT that can be written"


def _published(options: argparse.Namespace) -> int:
    from megappo.data.published.write import write_dataset

    chosen = {name: getattr(options, name) for name in ("validation", "seed", "instruction")}
    try:
        written = write_dataset(options.name, options.src, options.out, **chosen)
    except (ValueError, OSError) as error:
        return _refuse(_not_written(error, options.out))
    _print_report(Report(warnings=written.notes))
    for path, rows in written.rows.items():
        print(f"{path}: {rows:,} rows")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import importlib

    from megappo.bench.shapes import QWEN
    from megappo.bench.table import check_out

    if options.no_optimizer and options.name != "training":
        return _refuse(f"--no-optimizer: is for bench training, and {options.name} updates as it does: leave it out")
    if options.models is not None and options.name in NO_MODELS:
        return _refuse(f"--models {options.models}: bench {options.name} makes no model: leave it out")
    benchmark = importlib.import_module(f"megappo.bench.{options.name}")
    sizes = getattr(benchmark, "SIZES", tuple(QWEN))
    size = options.size or ("0.5b" if "0.5b" in sizes else sizes[0])
    if size not in sizes:
        return _refuse(f"--size {size}: not a size of bench {options.name}: sizes are {', '.join(sizes)}")
    check_out(options.out)
    more = {"optimizer": False} if options.no_optimizer else {}
    benchmark.run(size, options.models or MODELS, options.out, **more)
    return 0


def _convert(options: argparse.Namespace) -> int:
    import gc

    from megappo.convert.command import convert
    from megappo.convert.options import Options

    gc.freeze()  # what torch has imported: taking it apart at the end would cost seconds
    chosen = {name: value for name, value in vars(options).items() if name in Options.__dataclass_fields__}
    source = str(_folder_here(options.source, with_checkpoint=True))
    convert(source, options.destination, Options(**chosen), print)
    return 0


def _folder_here(run: str, *, with_checkpoint: bool = False) -> Path:
    """The folder of a run; what is behind a URL comes down into one."""
    if not is_url(run):
        return Path(run)
    from megappo.remote.down import local_folder

    return local_folder(run, lambda text: print(text, file=sys.stderr), with_checkpoint=with_checkpoint)


def _config(options: argparse.Namespace) -> int:
    schema = Config if options.task == "train" else SupervisedConfig
    for dotted, legal, default, help_text in describe_config(schema):
        print(f"{dotted}: {default}\n    {help_text} ({legal})")
    return 0


def layout_table(config: Config) -> str:
    """What would run: a line for each role with its pool, devices, parallel sizes and model."""
    rows = [
        _row(name, role, config.pools[role.pool].devices, config.model_folder(name))
        for name, role in config.roles.megatron.items()
    ]
    rollout = config.roles.rollout
    devices = config.pools[rollout.pool].devices
    sizes = (devices, rollout.tp, 1, devices // rollout.tp)
    return _table([*rows, ("rollout", rollout.pool, *map(str, sizes), config.model_folder("actor"))])


def supervised_table(config: SupervisedConfig) -> str:
    """The same of a reward model's or a supervised training."""
    return _table([_row("role", config.role, config.pools[config.role.pool].devices, config.model_folder)])


def _row(name: str, role: MegatronRoleConfig, devices: int, model: str) -> tuple[str, ...]:
    stages = f"{role.pp} x {role.vpp} chunks" if role.vpp > 1 else role.pp
    return (name, role.pool, *map(str, (devices, role.tp, stages, devices // (role.tp * role.pp))), model)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    rows = [("role", "pool", "devices", "tp", "pp", "dp", "model"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _print_report(report: Report) -> None:
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in report.errors:
        print(f"error: {line}", file=sys.stderr)


def _refuse(text: str, status: int = BAD_INPUT) -> int:
    print(f"error: {text}", file=sys.stderr)
    return status


def _add_task(command: argparse.ArgumentParser) -> None:
    text = "which command the configuration is for (default: train)"
    command.add_argument("--for", dest="task", choices=("train", "reward-train", "sft"), default="train", help=text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megappo", description="PPO for language models on Megatron-core and vLLM.")
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    # Told upon Ctrl-C or SIGTERM: what is left, and how to go on.
    parser.set_defaults(interrupted="the same command begins again")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    for name, run, text in (
        ("train", _train, "train; resumes by itself from the last checkpoint in run.dir"),
        ("check", _check, "find every mistake in a configuration without starting anything"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", default=[], help="for instance roles.rollout.tp=2"
        )
        command.set_defaults(run=run)

    commands.choices["train"].set_defaults(interrupted=RESUMES)
    _add_task(commands.choices["check"])
    for task, text in (
        ("reward-train", "train a reward model on pairs of responses (Bradley-Terry)"),
        ("sft", "train on given responses, for a warm start"),
    ):
        command = commands.add_parser(task, help=text, description=f"{text}; resumes by itself as train does")
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="for instance role.tp=2")
        command.set_defaults(run=_train_on_examples, task=task, interrupted=RESUMES)

    text = "score given responses: rewards, log-probabilities, and how often they beat others"
    command = commands.add_parser("score", help=text, description=text)
    command.add_argument("config", metavar="CONFIG", help="YAML file, as of train")
    command.add_argument("data", metavar="DATA", help="parquet file with prompt and response, or a RUN/rollouts one")
    command.add_argument("out", metavar="OUT", help="parquet file to write; data.replay can train on it")
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="for instance roles.actor.tp=2")
    command.add_argument("--column", default="response", metavar="C", help="column of the responses")
    command.add_argument("--against", metavar="FILE", help="other responses to the same prompts, to be beaten")
    command.add_argument("--against-column", metavar="C", help="column of those (alone: another one of DATA)")
    command.set_defaults(run=_score, interrupted="{out} was not written; the same command begins again")

    text = "memory, transfers and time of a step, predicted; or the layouts that would be best"
    command = commands.add_parser("plan", help=text, description=text)
    command.add_argument("config", metavar="CONFIG", help="YAML file; its model folders need only config.json")
    command.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="for instance roles.rollout.tp=2"
    )
    command.add_argument("--device", metavar="D", help="H200, H100, A100 or a YAML file (default: run.device_profile)")
    command.add_argument("--prompt", type=float, metavar="N", help="tokens of a prompt, on average (default: the most)")
    command.add_argument("--response", type=float, metavar="N", help="tokens of a response, on average")
    command.add_argument("--out", metavar="FILE", help="draw the step's timeline into an .html or .svg file")
    command.add_argument("--search", action="store_true", help="rank all layouts and placements instead")
    command.add_argument("--devices", type=int, metavar="N", help="search: devices to use (default: as many as pools)")
    command.add_argument("--write", metavar="FILE", help="search: write the best as a configuration")
    command.set_defaults(run=_plan)

    add_launch(commands)
    add_doctor(commands)

    text = "list every configuration key with its default and meaning"
    command = commands.add_parser("config", help=text, description=text)
    _add_task(command)
    command.set_defaults(run=_config)

    text = "write a run's report, one self-contained HTML page"
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument("run_dir", metavar="RUN", help="folder or URL of a run")
    text = "write it anew whenever the run has gone on, as a page that loads itself anew, until Ctrl-C"
    command.add_argument("--watch", action="store_true", help=text)
    command.set_defaults(run=_report)

    text = "measure a part against its bare counterpart, in one run"
    command = commands.add_parser("bench", help=text, description=text)
    command.add_argument(
        "name",
        choices=("rollout", "training", "sync", "step", "predicted", "convert", "planning", "reshard", "multigpu"),
    )
    sizes = "0.4b, 0.5b, 1.5b, 2b, 7b or tiny, with random weights (default 0.5b); planning: 405b, 1t-moe or all"
    sizes += "; reshard: 250mb or 1gb; predicted: 0.5b, 1.5b, 7b or all"
    command.add_argument("--size", metavar="S", help=f"shape of the model: {sizes}")
    command.add_argument("--models", metavar="DIR", help=f"where models are made and kept (default: {MODELS})")
    command.add_argument("--out", metavar="FILE", help="JSON file to add the table to")
    command.add_argument("--no-optimizer", action="store_true", help="training: an update ends with the gradients")
    text = "what was measured so far is above; models that were made stay, and the same command begins again"
    command.set_defaults(run=_bench, interrupted=text)

    text = "convert a Hugging Face folder to a Megatron checkpoint, or a checkpoint or run to a Hugging Face folder"
    command = commands.add_parser("convert", help=text, description=text)
    command.add_argument(
        "source", metavar="SRC", help="Hugging Face folder, torch_dist checkpoint, or a run's folder or URL"
    )
    command.add_argument("destination", metavar="DST", help="folder to make")
    command.add_argument("--to", choices=("hf", "megatron", "peft"), help="default: the format that SRC is not in")
    command.add_argument("--tp", type=int, metavar="N", help="to megatron: cut the files for N tensor ranks")
    command.add_argument("--pp", type=int, metavar="N", help="to megatron: and N pipeline stages")
    command.add_argument("--vpp", type=int, metavar="N", help="to megatron: of N chunks each")
    command.add_argument("--ep", type=int, metavar="N", help="to megatron: deal experts out to N ranks")
    command.add_argument("--etp", type=int, metavar="N", help="to megatron: cut each for N ranks; default: as --tp")
    command.add_argument(
        "--role", choices=("actor", "critic", "reward"), help="whose weights (of a run), or whose SRC are"
    )
    command.add_argument("--model", metavar="DIR", help="to hf: Hugging Face folder to take config and tokenizer from")
    command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: as in SRC")
    command.add_argument("--shard-gb", type=float, metavar="X", help="to hf: limit of a shard, 10^9 bytes; default: 4")
    text = "to megatron: limit of a chunk; of adapters: of what is merged at a time; 2^20 bytes; default: 32"
    command.add_argument("--bucket-mb", type=int, metavar="N", help=text)
    command.add_argument("--processes", type=int, metavar="N", help="default: one a core, at most 8")
    command.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    command.add_argument("--verify", action="store_true", help="compare both sides: weights, and outputs if small")
    text = "{destination} is whole or as it was before; the same command begins again, or finds nothing to do"
    command.set_defaults(run=_convert, interrupted=text)

    text = "make or convert prompt files"
    kinds = commands.add_parser("data", help=text, description=text).add_subparsers(metavar="KIND", required=True)
    text = "write train.parquet and validation.parquet with arithmetic questions"
    command = kinds.add_parser(
        "arithmetic", help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    command.add_argument("out", metavar="OUT", help="folder to write to")
    command.add_argument("--train", type=int, default=2000, metavar="N", help="training questions")
    command.add_argument("--validation", type=int, default=200, metavar="N", help="validation questions")
    command.add_argument("--digits", type=int, default=2, metavar="N", help="digits of every operand")
    command.add_argument("--operations", default=argparse.SUPPRESS, metavar="OPS", help="any of + - * (default: +)")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the choice of questions")
    command.add_argument("--chat", action="store_true", help="write chat messages instead of plain strings")
    command.add_argument("--word-problems", action="store_true", help="write one- and two-step word problems")
    command.set_defaults(run=_arithmetic)
    for name, instruction in INSTRUCTIONS.items():
        text = f"convert the published files of {name} to train.parquet and validation.parquet"
        command = kinds.add_parser(name, help=text, description=text)
        command.add_argument("src", metavar="SRC", help="parquet, JSON (lines, .gz) or Arrow file, or a folder of them")
        command.add_argument("out", metavar="OUT", help="folder to write to")
        text = "questions to draw from the training split (default: the published split, or else a twentieth)"
        command.add_argument("--validation", type=int, metavar="N", help=text)
        command.add_argument("--seed", type=int, metavar="S", help="seed of that draw (default: 0)")
        text = "system message" if name == "hh-rlhf" else "text after each question"
        command.add_argument("--instruction", metavar="TEXT", help=f"{text} (default: {instruction or 'none'})")
        command.set_defaults(run=_published, name=name)
    return parser
