from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftwatch.errors import SettingsError
from driftwatch.records import segment_labels
from driftwatch.settings import Segment
from driftwatch.tap.places import SILENT_S
from driftwatch.tap.segments import MAX_VALUES, Segments, bucket

TENANT = Segment(label="tenant", header="X-Tenant")
SIZE = Segment(label="prompt_bytes", bucket=[2048, 16384])
TEAM = Segment(label="team", json_path="$.metadata.team")
EDGES = [2048.0, 16384.0]


def labels(
    segments: list[Segment], body: bytes | None = None, size: int | None = None, **headers: str
) -> dict[str, str]:
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Segments(segments).of(lines, body, size)[1]


def test_header_and_size() -> None:
    segment, found = Segments([TENANT, SIZE]).of([(b"x-tenant", b"a,b=c")], None, 3000)
    assert found == {"tenant": "a,b=c", "prompt_bytes": "2048-16384"}
    assert segment == "prompt_bytes=2048-16384,tenant=a%2Cb%3Dc"
    assert segment_labels(segment) == found


def test_no_labels_is_one_segment() -> None:
    assert Segments([]).of([], b"", 0) == ("all", {})


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"metadata": {"team": "red"}}', "red"),
        (b'{"metadata": {"team": 7}}', "7"),
        (b'{"metadata": {"team": true}}', "true"),
        (b'{"metadata": {"team": {"a": 1}}}', "none"),
        (b'{"metadata": {"team": null}}', "none"),
        (b'{"metadata": {}}', "none"),
        (b"[1]", "none"),
        (b"not json", "none"),
        (None, "none"),
    ],
)
def test_json_path(body: bytes | None, value: str) -> None:
    assert labels([TEAM], body) == {"team": value}


def test_a_missing_or_empty_header_is_none() -> None:
    assert labels([TENANT]) == labels([TENANT], x_tenant="") == {"tenant": "none"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "<2048"),
        (2047, "<2048"),
        (2048, "2048-16384"),
        (16383.9, "2048-16384"),
        (16384, ">=16384"),
        (float("inf"), ">=16384"),
        ("3000", "2048-16384"),
        ("many", "none"),
        (None, "none"),
        (float("nan"), "none"),
        ({}, "none"),
    ],
)
def test_buckets(value: object, expected: str) -> None:
    assert bucket(value, EDGES) == expected


def test_a_bucket_of_one_edge_and_of_fractions() -> None:
    assert bucket(0.2, [0.5]) == "<0.5"
    assert bucket(0.6, [0.5, 1.0]) == "0.5-1"


@given(st.lists(st.text(max_size=5), max_size=300))
def test_the_number_of_values_is_capped(values: list[str]) -> None:
    segments = Segments([TENANT], max_segments=10_000)
    found = {segments.of([(b"x-tenant", value.encode())], None, 0)[1]["tenant"] for value in values}
    assert len(found) <= MAX_VALUES + 2  # none, other


def test_values_over_the_cap_are_other_and_known_ones_stay() -> None:
    segments = Segments([TENANT], max_segments=10_000)
    found = [segments.of([(b"x-tenant", b"t%d" % number)], None, 0)[1]["tenant"] for number in range(150)]
    assert found == [f"t{number}" for number in range(100)] + ["other"] * 50
    assert segments.of([(b"x-tenant", b"t3")], None, 0)[1] == {"tenant": "t3"}


def test_segments_over_the_cap_count_as_other_and_keep_their_labels() -> None:
    segments = Segments([TENANT], max_segments=1)
    assert segments.of([(b"x-tenant", b"a")], None, 0) == ("tenant=a", {"tenant": "a"})
    assert segments.of([(b"x-tenant", b"b")], None, 0) == ("other", {"tenant": "b"})


def test_a_segment_that_was_silent_for_a_day_gives_its_place_to_another() -> None:
    now, freed = 1000.0, list[str]()
    segments = Segments([TENANT], max_segments=2, clock=lambda: now, freed=freed.append)

    def of(tenant: bytes) -> str:
        return segments.of([(b"x-tenant", tenant)], None, 0)[0]

    assert (of(b"a"), of(b"b"), of(b"c")) == ("tenant=a", "tenant=b", "other")
    now += SILENT_S - 1
    assert (of(b"a"), of(b"c")) == ("tenant=a", "other")
    assert freed == []
    now += 1
    assert of(b"c") == "tenant=c"
    assert freed == ["tenant=b"], "the one that was silent longest"
    assert (of(b"b"), of(b"a")) == ("other", "tenant=a")


def test_values_that_were_silent_for_a_day_give_their_places_away() -> None:
    now = 1000.0
    segments = Segments([TENANT], max_segments=10_000, clock=lambda: now)

    def of(number: int) -> str:
        return segments.of([(b"x-tenant", b"t%d" % number)], None, 0)[1]["tenant"]

    assert [of(number) for number in (*range(100), 100)] == [*(f"t{number}" for number in range(100)), "other"]
    now += SILENT_S
    assert [of(number) for number in (100, 1, 0, 101)] == ["t100", "t1", "t0", "t101"]
    assert segments.of([], None, 0)[1] == {"tenant": "none"}


def test_long_values_are_cut() -> None:
    assert labels([TENANT], x_tenant="x" * 1000) == {"tenant": "x" * 128}


@pytest.mark.parametrize("header", ["Authorization", "cookie", "X-Api-Key"])
def test_a_credential_cannot_be_a_label(header: str) -> None:
    with pytest.raises(SettingsError, match="holds a credential"):
        Segments([Segment(label="key", header=header)])


def test_a_path_that_is_none_is_refused_with_its_label() -> None:
    with pytest.raises(SettingsError, match=r"label 'team': '\$\.a\[' is no JSONPath"):
        Segments([Segment(label="team", json_path="$.a[")])
