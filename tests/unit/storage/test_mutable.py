"""Mutable parameters: known keys, checked values, all or nothing."""

import pytest

from moorage.storage import InvalidValue
from moorage.storage.tunables import Tunables, seconds_from, validated


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("24h", 86400), ("7d", 604800), ("1d12h", 129600), ("0", 0)]
)
def test_durations_are_read(text, seconds):
    assert seconds_from(text) == seconds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("directIO", "yes"),
        ("readAheadKiB", "-1"),
        ("readAheadKiB", "1.5"),
        ("readAheadKiB", str(1 << 40)),
        ("trashRetention", "soon"),
        ("trashRetention", ""),
        ("trashRetention", "9" * 40),
        ("readIOPS", "lots"),
        ("writeBytesPerSecond", "٣"),
        ("XXX_FakeKey", "1"),
        ("directio", "true"),
    ],
)
def test_bad_keys_and_values_are_named(key, value):
    with pytest.raises(InvalidValue, match=key):
        validated({"readIOPS": "10", key: value})


def test_settings_are_values():
    settings = Tunables.of({"directIO": "false", "readIOPS": "100", "trashRetention": "1h"})
    assert settings.direct_io is False
    assert settings.read_iops == 100
    assert settings.write_iops == 0
    assert settings.trash_retention_s == 3600
    assert settings.has_io_limits
    assert Tunables.of({}).direct_io is None
    assert not Tunables.of({}).has_io_limits
