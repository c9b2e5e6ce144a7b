"""The user's own function."""

from __future__ import annotations

import pytest

from driftwatch.errors import SettingsError, StoreError
from driftwatch.retrain.redaction import redactor

ROW = {"id": "r", "labels": {}, "input_ids": [1, 2], "loss_mask": [0, 1]}


def test_without_one_rows_stay_as_they_are() -> None:
    assert redactor(None)(ROW) == ROW


@pytest.mark.parametrize("name", ["no.such.module:f", "json:nothing", "driftwatch:__version__", "no-such-entry-point"])
def test_a_name_of_nothing_is_a_settings_error(name: str) -> None:
    with pytest.raises(SettingsError, match="`retrain.data.redact`: "):
        redactor(name)


def test_a_function_that_fails_ends_the_export_without_the_text_of_the_row() -> None:
    with pytest.raises(StoreError, match="operator:not_ returned no row"):
        redactor("operator:not_")(ROW)
    with pytest.raises(StoreError, match="json:loads failed on a row: TypeError$"):
        redactor("json:loads")(ROW)


def test_it_gets_a_copy() -> None:
    row = dict(ROW)
    assert redactor("builtins:dict")(row) == row
    assert redactor("builtins:dict")(row) is not row
