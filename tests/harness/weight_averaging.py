"""Lightning's weight averaging callbacks, which versions before 2.6 do not have."""

from __future__ import annotations

from typing import Any

import lightning.pytorch.callbacks as callbacks
import pytest

WeightAveraging: Any = getattr(callbacks, "WeightAveraging", None)
EMAWeightAveraging: Any = getattr(callbacks, "EMAWeightAveraging", None)

needs_weight_averaging = pytest.mark.skipif(
    EMAWeightAveraging is None, reason="this version of Lightning has no EMAWeightAveraging"
)
