import pytest

from sparselib.results.profiles import PROFILES, choose


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_has_its_settings(profile):
    assert choose(profile, smoke="smoke", laptop="laptop", paper="paper") == profile


@pytest.mark.parametrize("profile", ["", "Laptop", "full", None])
def test_unknown_profiles_are_refused(profile):
    with pytest.raises(ValueError, match=f"profile = {profile!r}: must be one of 'smoke', 'laptop', 'paper'"):
        choose(profile, smoke=1, laptop=2, paper=3)
