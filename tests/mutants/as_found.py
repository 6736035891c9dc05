"""A pytest plugin: Hypothesis reports the first failure that it finds as it is, and looks the same way every time."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("as_found", phases=[Phase.explicit, Phase.generate], derandomize=True)
settings.load_profile("as_found")
