"""The source text of the package, for tests that inspect it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_loco"


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = ("lightning_loco", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    """Return the text of each module of the package, and of ``train``."""
    texts = {module_name(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return {**texts, "train": (ROOT / "train.py").read_text(encoding="utf-8")}


def can_import(module: str) -> bool:
    """Whether what a front end of the package needs is installed."""
    needs = {"huggingface": "transformers", "ray": "ray"}
    front_end = module.removeprefix("lightning_loco.integrations.")
    return front_end not in needs or importlib.util.find_spec(needs[front_end]) is not None
