"""The three sizes of every experiment."""

from __future__ import annotations

from typing import TypeVar

from ..checks import require_choice

PROFILES = ("smoke", "laptop", "paper")
Settings = TypeVar("Settings")


def choose(profile: str, *, smoke: Settings, laptop: Settings, paper: Settings) -> Settings:
    """The settings for ``profile``: smoke (seconds, for tests), laptop (minutes, the book's), paper (GPUs).

    Errors: ValueError naming the profile and the three there are.
    """
    require_choice("profile", profile, PROFILES)
    return {"smoke": smoke, "laptop": laptop, "paper": paper}[profile]
