"""The program ``train.py``: choose an algorithm, a topology, a model and data by name, and train.

``python train.py --help`` lists the choices. Slow imports are made only when a run starts, so that
``--help`` and ``--cfg job`` are fast.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import lightning_loco
from lightning_loco._util.text import suggestion
from lightning_loco.app.run_folder import claim
from lightning_loco.tools.doctor.facts import describe_versions

STARTED = datetime.now()


def conf_dir() -> str:
    """Return the folder of configurations: in the package if installed, beside it in a checkout.

    Raises:
        FileNotFoundError: If the configurations are not found.
    """
    package = Path(lightning_loco.__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"No conf/train.yaml in {package} or {package.parent}. Install lightning_loco, or run in a"
        " checkout."
    )


def is_checkout() -> bool:
    """Return whether the program is ``train.py`` of a checkout, not the installed one."""
    return Path(sys.argv[0]).name == "train.py"


def rank() -> int:
    """Return the rank of this process, set by its launcher: torchrun, SLURM, or Lightning's own."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def run_stamp() -> str:
    """Return the name of the run's folder: of the SLURM job, torchrun's id, or date and time.

    It is the same on all ranks of a run. Ranks that Lightning starts get the folder of rank 0.
    """
    if is_slurm():
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_STEP_ID', '0')}"
    if is_torchrun() and os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        name = os.environ["TORCHELASTIC_RUN_ID"]
        if name == "none":  # the run has no name
            name = "{MASTER_ADDR}-{MASTER_PORT}".format_map(os.environ)
        return f"torchrun-{name}"
    start = parent_start() if is_torchrun() else STARTED
    return start.strftime("%Y-%m-%d/%H-%M-%S")


def run_name() -> str:
    """Return a string that is equal on all ranks of this run, and different from other runs'."""
    stamp = run_stamp()
    if stamp.startswith(("slurm-", "torchrun-")):
        return stamp
    process = os.getppid() if is_torchrun() else os.getpid()
    return f"{platform.node()} {process} {stamp}"


def is_slurm() -> bool:
    """Return whether SLURM has started this process, not from a shell."""
    name = os.environ.get("SLURM_JOB_NAME")
    return "SLURM_JOB_ID" in os.environ and name not in ("bash", "interactive")


def is_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_folder(root: str) -> str:
    """Make and return the folder of this run below ``root``; with ``--resolve`` only return it."""
    folder = Path(root, run_stamp())
    if "--resolve" in sys.argv:
        return str(folder)
    return str(claim(folder, run_name()))


def parent_start() -> datetime:
    """Return when the parent process started, which is equal for all workers of torchrun."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        machine = Path("/proc/stat").read_text().splitlines()
        boot_s = next(int(line.split()[1]) for line in machine if line.startswith("btime"))
    except (OSError, StopIteration):
        return STARTED
    return datetime.fromtimestamp(boot_s + int(fields[19]) // os.sysconf("SC_CLK_TCK"))


OmegaConf.register_new_resolver("loco_run_folder", run_folder, use_cache=True, replace=True)
OmegaConf.register_new_resolver(
    "loco_log_name", lambda: f"train-rank{rank()}.log" if rank() else "train.log", replace=True
)
OmegaConf.register_new_resolver(
    "loco_rank_zero", lambda value: None if rank() else value, replace=True
)
OmegaConf.register_new_resolver(
    "loco_program",
    lambda: "python train.py" if is_checkout() else "lightning-loco-train",
    replace=True,
)
OmegaConf.register_new_resolver(
    "loco_script",
    lambda: "train.py" if is_checkout() else "--no-python lightning-loco-train",
    replace=True,
)
OmegaConf.register_new_resolver("loco_conf_dir", lambda: os.path.relpath(conf_dir()), replace=True)
OmegaConf.register_new_resolver(
    "loco_groups",
    lambda: "".join(
        f"{group}: {', '.join(choices_of(Path(conf_dir(), group)))}\n"
        for group in sorted(default_choices().keys() - {"hydra"})
    ),
    replace=True,
)


def choices_of(group: Path) -> list[str]:
    """Return the names of the configurations in a folder; files with ``_`` are parts of them."""
    files = (file for file in sorted(group.rglob("*.yaml")) if not file.stem.startswith("_"))
    return [file.relative_to(group).with_suffix("").as_posix() for file in files]


def default_choices() -> dict[str, str]:
    """Return the groups of the configuration, with the choice of each."""
    defaults = OmegaConf.load(Path(conf_dir()) / "train.yaml").defaults
    groups = [entry for entry in defaults if isinstance(entry, DictConfig)]
    return {str(name): str(choice) for entry in groups for name, choice in entry.items()}


def known_keys() -> set[str]:
    """Return all keys at the top level of the configuration, groups included."""
    default = OmegaConf.load(Path(conf_dir()) / "train.yaml")
    return {str(name) for name in default} - {"defaults"} | set(default_choices())


def unknown_key(cfg: DictConfig) -> str | None:
    """Describe a key at the top level that is never read; None if there is none.

    ``+algoritm=diloco`` would add a key and train the default algorithm. A key that another value
    refers to (``${width}``) is read.
    """
    known, text = known_keys(), OmegaConf.to_yaml(cfg)
    for key in map(str, cfg):
        if key not in known and f"${{{key}" not in text:
            instead = suggestion(key, known, "{}=...") or f" There are {', '.join(sorted(known))}."
            return f"{key} is no setting, and nothing refers to it.{instead}"
    return None


def unknown_choice(arguments: Sequence[str]) -> str | None:
    """Describe an unknown key or choice on the command line; None if there is none.

    Hydra refuses it too, with a page of text. Nothing is checked if the user has set a search path
    or a primary configuration, which only Hydra can resolve.
    """
    options, overrides = _parse(arguments)
    if options.config_path or options.config_name or "hydra.searchpath=" in " ".join(overrides):
        return None
    groups, known = default_choices(), known_keys()
    experiment = read_experiment(_experiment(overrides))
    known |= set(experiment[1]) if experiment else set()
    folders = [Path(folder) for folder in (conf_dir(), options.config_dir) if folder]
    nothing = {"null", "false", "None", ""}
    for override in overrides:
        if not (found := re.fullmatch(r"(\+*)(\w+)=\[?([\w,/-]*)\]?", override)):
            continue
        added, key, values = found.groups()
        if not added and key not in known and experiment:
            instead = suggestion(key, known, "{}=...") or f" There are {', '.join(sorted(known))}."
            return f"{key} is no setting.{instead}"
        choices = {choice for folder in folders for choice in choices_of(folder / key)}
        for value in values.split(",") if key in groups else ():
            if value not in choices and not (value in nothing and "none" not in choices):
                name = "none" if value in nothing else value
                instead = suggestion(name, choices, f"{key}={{}}")
                all_of_them = ", ".join(sorted(choices))
                return f"{key}={value}: no such {key}.{instead}\nThere are {all_of_them}."
    return None


def unreadable_value(arguments: Sequence[str]) -> str | None:
    """Describe a value on the command line that Hydra cannot read; None if it can read all."""
    parser = OverridesParser.create()
    for override in _parse(arguments)[1]:
        key, sign, value = override.partition("=")
        if not sign or key.startswith("-"):
            continue
        try:
            parser.parse_override(override)
        except HydraException:
            quoted = shlex.quote(f'{key}="{value}"')
            return f"{override} cannot be read. If the value is text, quote it twice: {quoted}"
    return None


def unknown_setting(arguments: Sequence[str]) -> str | None:
    """Describe a setting on the command line that no configuration names; None if there is none.

    Hydra refuses it too, with a page of text. Nothing is checked with the options of
    :func:`unknown_choice`, with several experiments, or for files of the user.
    """
    options, overrides = _parse(arguments)
    joined = "\n".join(overrides)
    if any(vars(options).values()) or "hydra.searchpath=" in joined:
        return None
    groups, known = default_choices(), known_keys()
    experiment = read_experiment(_experiment(overrides))
    if experiment is None:
        return None
    chosen = groups | experiment[0] | dict(re.findall(r"^\+*(\w+)=(.*)$", joined, re.M))
    known |= set(experiment[1])
    added = "".join(f"{key}." for key in re.findall(r"^\+{1,2}([\w.]+)=", joined, re.M))
    for group, names, value in re.findall(r"^(\w+)((?:\.\w+)+)(=.*)$", joined, re.M):
        if group == "hydra":
            continue
        if group not in known and f"{group}." not in added:
            return f"{group} is no setting.{suggestion(group, known, f'{{}}{names}{value}')}"
        for choice in chosen.get(group, "").split(","):
            of_choice = f"{group}={choice}" if choice else group
            settings = settings_of(group, choice)
            if isinstance(settings, dict):
                settings |= experiment[1].get(group) or {}
            path, own_group = group, names.split(".")[1]
            is_group = own_group in groups and own_group not in (settings or groups)
            if group == "algorithm" and is_group:
                return f"{own_group} is another group: write {names[1:]}{value}."
            if choice and settings == {} and not own_group.startswith("_"):
                return f"{group}{names}: {of_choice} has no settings. Add {group}=NAME."
            for name in names.split(".")[1:]:
                if not isinstance(settings, Mapping) or name.startswith("_"):
                    break
                if name not in settings and f"{path}.{name}." not in added:
                    instead = suggestion(name, settings, f"{path}.{{}}")
                    adding = f" To pass it on, write +{group}{names}=..." if choice else ""
                    return f"{path}.{name} is no setting of {of_choice}.{instead}{adding}"
                path, settings = f"{path}.{name}", settings.get(name)
    return None


def _experiment(overrides: Sequence[str]) -> str:
    """Return the experiment that a command line chooses; "null" for none."""
    chosen = [one.partition("=")[2] for one in overrides if re.match(r"\+*experiment=", one)]
    return chosen[-1] if chosen else "null"


def read_experiment(name: str) -> tuple[dict[str, str], dict[str, Any]] | None:
    """Return the choice of each group that an experiment overrides, and its settings.

    None if there is no such file, or if only Hydra can resolve its defaults.
    """
    if name == "null":
        return {}, {}
    file = Path(conf_dir()) / "experiment" / f"{name}.yaml"
    if not file.is_file():
        return None
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    choices: dict[str, str] = {}
    for entry in content.pop("defaults", []):
        for key, choice in entry.items() if isinstance(entry, dict) else ():
            choices[key.removeprefix("override /")] = str(choice)
        if entry != "_self_" and not isinstance(entry, dict):
            return None
    return choices, {str(key): value for key, value in content.items()}


def settings_of(group: str, choice: str) -> Any:
    """Return the settings that a configuration and those that it is based on name, with values.

    None if there is no such configuration.
    """
    if not choice:
        return OmegaConf.select(OmegaConf.load(Path(conf_dir()) / "train.yaml"), group)
    file = Path(conf_dir()) / group / f"{choice}.yaml"
    if not file.is_file():
        return None
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    bases = [base.split("@")[0] for base in content.pop("defaults", []) if base != "_self_"]
    own = content.get(group, content)  # the first in a file of the package _global_
    inherited = [settings_of(group, base) for base in bases]
    merged = {key: value for part in (*inherited, own) for key, value in part.items()}
    return {key: value for key, value in merged.items() if not str(key).startswith("_")}


def _parse(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the options that change where configurations are, and all other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    return parser.parse_known_args(arguments)


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="train")
def run_configured(cfg: DictConfig) -> float | None:
    """Train or simulate as configured; returns the final validation loss, for sweeps.

    An invalid setting ends the process with one line on stderr and status 1; HYDRA_FULL_ERROR=1
    shows the traceback.
    """
    if mistake := unknown_key(cfg):
        raise SystemExit(error_text(mistake))
    # Imported here, because these modules import PyTorch or Lightning.
    from lightning_loco.app.early_checks import SettingsError, checked

    try:
        if cfg.simulate:
            from lightning_loco.app.simulated_run import run_simulation

            return run_simulation(cfg)
        cfg = checked(cfg)
        from lightning_loco.app.run import run

        return run(cfg)
    except SettingsError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise SystemExit(error_text(error)) from None


def error_text(error: object) -> str:
    """Return the error message of the process, with the rank if that is not 0."""
    prefix = f"[rank {rank()}] " if rank() else ""
    return f"{prefix}error: {error}"


def main() -> None:
    """Check the names on the command line, then run it."""
    if isinstance(sys.stdout, TextIOWrapper):  # a sample may be more than the terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    if "--version" in sys.argv[1:]:
        print(describe_versions())
        return
    for check in (unreadable_value, unknown_choice, unknown_setting):
        if mistake := check(sys.argv[1:]):
            raise SystemExit(error_text(mistake))
    run_configured()
