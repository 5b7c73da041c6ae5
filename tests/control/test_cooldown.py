"""How long devices are kept that are not needed at the moment."""

from __future__ import annotations

from cotenant.control.cooldown import Cooldown


def test_release_that_was_too_early_lengthens_the_cool_down_up_to_the_longest() -> None:
    cooldown = Cooldown(60.0, 500.0)
    cooldown.released(100.0)
    cooldown.wanted(110.0)
    assert cooldown.seconds == 240.0
    cooldown.wanted(120.0)
    assert cooldown.seconds == 240.0, "one release is judged once"
    cooldown.released(1000.0)
    cooldown.wanted(1001.0)
    assert cooldown.seconds == 500.0


def test_releases_that_were_not_too_early_shorten_it_again() -> None:
    cooldown = Cooldown(60.0, 960.0)
    cooldown.released(0.0)
    cooldown.wanted(1.0)
    cooldown.released(1000.0)
    assert cooldown.seconds == 240.0, "the first release has been judged, and the second not yet"
    cooldown.released(3000.0)
    assert cooldown.seconds == 120.0
    cooldown.released(4000.0)
    cooldown.released(9000.0)
    assert cooldown.seconds == 60.0, "never less than the least"


def test_devices_that_are_wanted_long_after_a_release_do_not_lengthen_it() -> None:
    cooldown = Cooldown(60.0, 960.0)
    cooldown.wanted(0.0)
    cooldown.released(10.0)
    cooldown.wanted(10.0 + 4 * 60.0 + 1.0)
    assert cooldown.seconds == 60.0
