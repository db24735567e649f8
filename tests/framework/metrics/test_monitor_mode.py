"""Names of metrics that are better when they are higher, where no mode was given."""

from __future__ import annotations

import pytest

from phalanx.framework.metrics.monitor import doubtful_mode


@pytest.mark.parametrize("name", ["val_accuracy", "val/acc", "F1", "valAUC", "bleu4", "map_50", "test_f1_macro"])
def test_a_metric_that_is_better_when_it_is_higher(name: str) -> None:
    note = doubtful_mode("EarlyStopping", name, None)
    assert note is not None
    assert repr(name) in note
    assert doubtful_mode("EarlyStopping", name, "min") is None


@pytest.mark.parametrize("name", ["val_loss", "score_loss", "accelerate", "mapping", "perplexity", None, 3])
def test_other_metrics(name: str | None) -> None:
    assert doubtful_mode("ModelCheckpoint", name, None) is None
