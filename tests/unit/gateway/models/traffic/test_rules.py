"""Rules that do not fit together are refused with what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.traffic_rules import TrafficRule

STEPS = [{"percent": 10, "seconds": 60}, {"percent": 100, "seconds": 60}]


def rule(**fields: Any) -> dict[str, Any]:
    return {"name": "m", "targets": [{"model": "a"}, {"model": "b", "version": 2}]} | fields


def load(*rules: Any) -> tuple[TrafficRule, ...]:
    return load_config({"traffic": list(rules)}, environ={}).traffic.traffic


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"targets": []}, "needs 1 to 16 targets"),
        ({"targets": [{"model": f"m{n}"} for n in range(17)]}, "needs 1 to 16 targets"),
        ({"targets": [{"model": "a"}, {"model": "a"}]}, "a target is named twice"),
        ({"targets": [{"model": "a", "weight": 0}]}, "all weights are 0"),
        ({"targets": [{"model": "a", "weight": -1}]}, "weight: expected a number >= 0"),
        ({"targets": [{"model": "a", "wieght": 1}]}, "unknown field `wieght`"),
        ({"sticky": "cookie"}, "sticky is 'tenant' or 'header:NAME', not 'cookie'"),
        ({"sticky": "header:"}, "sticky is 'tenant' or 'header:NAME'"),
        ({"shadow": {"model": "a"}}, "the shadow 'a' is one of its targets"),
        ({"shift": {"to": "b", "steps": STEPS}}, "shift.to 'b' is not one of its targets"),
        ({"shift": {"to": "b/2", "steps": []}}, "shift.steps must rise, and end at 100 percent"),
        ({"shift": {"to": "b/2", "steps": STEPS[:1]}}, "shift.steps must rise, and end at 100 percent"),
        ({"shift": {"to": "b/2", "steps": [*STEPS, STEPS[1]]}}, "shift.steps must rise, and end at 100 percent"),
        (
            {"targets": [{"model": "a", "weight": 0}, {"model": "b"}], "shift": {"to": "b", "steps": STEPS}},
            "a shift needs a target to begin with",
        ),
    ],
)
def test_what_does_not_fit_together(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=r"traffic|weight|targets") as caught:
        load(rule(**fields))
    assert text in str(caught.value)


def test_two_rules_for_a_name_and_what_is_no_rule() -> None:
    with pytest.raises(ConfigError, match="a name has two rules"):
        load(rule(), rule())
    with pytest.raises(ConfigError, match="a rule is a JSON object"):
        load("{")
    with pytest.raises(ConfigError, match="a list of rules"):
        load_config({"traffic": {"name": "m"}}, environ={})


def test_rules_come_from_files_flags_and_variables(tmp_path: Path) -> None:
    wanted = load(rule(sticky="header: X-User "))
    assert wanted[0].sticky_header == b"x-user"
    assert [target.id for target in wanted[0].targets] == ["a", "b/2"]
    text = json.dumps(rule(sticky="header: X-User "))
    assert load(text) == wanted
    assert load_config({}, environ={"PENSTOCK_TRAFFIC": text}).traffic.traffic == wanted
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({"traffic": [json.loads(text)]}))
    assert load_config({}, file=file, environ={}).traffic.traffic == wanted
    toml = tmp_path / "penstock.toml"
    toml.write_text(
        '[[traffic]]\nname = "m"\nsticky = "header: X-User "\n'
        '[[traffic.targets]]\nmodel = "a"\n[[traffic.targets]]\nmodel = "b"\nversion = 2\n'
    )
    assert load_config({}, file=toml, environ={}).traffic.traffic == wanted
