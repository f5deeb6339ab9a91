"""Adapts a run of the command line to its launcher and machine."""

from __future__ import annotations

import logging
import os
import warnings

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

log = logging.getLogger(__name__)


def follow_launcher(cfg: DictConfig) -> DictConfig:
    """Take the number of workers from torchrun or SLURM, unless the command line names it."""
    cfg = cfg.copy()
    launch = outer_launch()
    if launch is None or not HydraConfig.initialized():
        return cfg
    launcher, devices, num_nodes = launch
    named = {override.lstrip("+").split("=")[0] for override in HydraConfig.get().overrides.task}
    for key, value in (("devices", devices), ("num_nodes", num_nodes)):
        before = cfg.trainer.get(key)
        if f"trainer.{key}" not in named and before != value:
            log.info("%s decides: trainer.%s=%d instead of %s.", launcher, key, value, before)
            OmegaConf.update(cfg, f"trainer.{key}", value, force_add=True)
    return cfg


def outer_launch() -> tuple[str, int, int] | None:
    """Return the launcher of this process: (name, processes per machine, machines), or None.

    ValueError if this machine has another number of processes than the mean of all.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        local, world = int(env["LOCAL_WORLD_SIZE"]), int(env["WORLD_SIZE"])
        num_nodes = int(env.get("GROUP_WORLD_SIZE", world // local))
        if local * num_nodes != world:
            raise ValueError(
                f"torchrun has started {local} processes on this machine, and {world} on"
                f" {num_nodes} machines. Use the same --nproc-per-node on all of them."
            )
        return "torchrun", local, num_nodes
    if "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        num_nodes = int(env.get("SLURM_NNODES", 1))
        return "SLURM", int(env["SLURM_NTASKS"]) // num_nodes, num_nodes
    return None


def quieten_lightning() -> None:
    """Disable Lightning's second copy of each message, its tips, and warnings about itself."""
    if HydraConfig.initialized():
        # Hydra's handlers of the root logger already print and write everything.
        logging.getLogger("lightning").handlers.clear()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_tip)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")


def is_no_tip(record: logging.LogRecord) -> bool:
    """Return whether a message is not one of Lightning's tips to install something."""
    return "Tip:" not in str(record.msg)
