"""Settings limit what plans make of devices, on all nodes together."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.config import DeviceSettings, read_settings
from cotenant.config.devices import limited
from cotenant.core.model import Kind
from cotenant.errors import ConfigError

A, B = Kind(name="node-a/h100", count=2, cuts=(250, 500, 1000)), Kind(name="node-b/h100", count=2, cuts=(500, 1000))
CPU = Kind(name="cpu", count=1)


def test_kind_without_settings_stays_as_it_is() -> None:
    assert limited((B, CPU, A), ()) == (B, CPU, A)


def test_count_is_of_all_nodes_together_the_first_by_name_before_others() -> None:
    found = limited((B, CPU, A), (DeviceSettings(kind="h100", count=3),))
    assert [(kind.name, kind.count) for kind in found] == [("node-b/h100", 1), ("cpu", 1), ("node-a/h100", 2)]


def test_settings_of_one_node_s_kind_are_for_that_alone() -> None:
    found = limited((A, B), (DeviceSettings(kind="node-b/h100", count=0), DeviceSettings(kind="h100", price=2.0)))
    assert [(kind.count, kind.price) for kind in found] == [(2, 2.0), (0, None)]


def test_cuts_are_those_that_both_have() -> None:
    found = limited((A, B), (DeviceSettings(kind="h100", cuts=(250, 300, 1000)),))
    assert [kind.cuts for kind in found] == [(250, 1000), (1000,)]
    with pytest.raises(ConfigError, match="none of the cuts is legal for node-b/h100; it has 50 %, 100 %"):
        limited((A, B), (DeviceSettings(kind="h100", cuts=(250,)),))


def test_file_has_devices_and_the_clusters_settings(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        'model_control_mode = "kubernetes"\n[kubernetes]\nnamespace = "models"\nlease_duration = "5s"\n'
        '[[devices]]\nkind = "h100"\ncount = 4\nprice = 2.9\ncuts = [50, 100]\n'
    )
    settings = read_settings(path)
    assert settings.devices == (DeviceSettings(kind="h100", count=4, price=2.9, cuts=(500, 1000)),)
    assert (settings.kubernetes.namespace, settings.kubernetes.lease_duration) == ("models", 5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[devices]]\nkind = ""', r"devices\[0\].kind: is empty"),
        ('[[devices]]\nkind = "a"\ncount = -1', r"devices\[0\].count: -1 devices"),
        ('[[devices]]\nkind = "a"\nprice = -1', r"devices\[0\].price: -1 must be finite"),
        ('[[devices]]\nkind = "a"\n[[devices]]\nkind = "a"', r"devices\[1\].kind: 'a' appears twice"),
        ('[kubernetes]\nlease = "A b"', "kubernetes.lease: 'A b' is not a name"),
        (
            '[kubernetes]\nlease_duration = "0.5s"',
            "kubernetes.lease_duration: '0.5s' is out of range; write 1s to 300s",
        ),
    ],
)
def test_settings_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings(path)
