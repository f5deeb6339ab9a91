"""All defects that exploration must find."""

from __future__ import annotations

from tests.exploration.mutant import Mutant

MUTANTS: list[Mutant] = []
