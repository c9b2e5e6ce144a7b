"""A client's word that its request must not be trained on travels with the record."""

from __future__ import annotations

from typing import Any

import pytest

from .test_tap import asked, bench, recorded


@pytest.mark.parametrize(
    ("headers", "forbidden"),
    [
        ({}, None),
        ({"x-driftwatch-no-train": "1"}, True),
        ({"X-Driftwatch-No-Train": "TRUE"}, True),
        ({"x-driftwatch-no-train": ""}, True),
        ({"x-driftwatch-no-train": "perhaps"}, True),
        ({"x-driftwatch-no-train": "0"}, None),
        ({"x-driftwatch-no-train": "False"}, None),
        ([("x-driftwatch-no-train", "1"), ("x-driftwatch-no-train", "0")], True),
    ],
)
async def test_the_header_is_in_the_record(headers: Any, forbidden: bool | None) -> None:
    path, request, pieces = recorded("plain")
    async with bench(vllm=True, sampling={"window_s": 3600}) as b:
        await b.until_probed()
        b.engine.replays(pieces)
        given = [("x-request-id", "r-1"), *(headers.items() if isinstance(headers, dict) else headers)]
        await b.ask(b.url, "POST", path, data=asked(request), headers=given)
    (record,) = [record for record in b.control.records if record["id"] == "r-1"]
    assert record.get("no_train") is forbidden
