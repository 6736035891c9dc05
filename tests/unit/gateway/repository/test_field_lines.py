"""Where in a config.pbtxt a field stands."""

from __future__ import annotations

from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.model_config import ModelConfig
from penstock.gateway.repository.config_fields import field_lines, set_paths

TEXT = """name: "a" # backend: {
backend: "python"
input [
  { name: "I" data_type: TYPE_FP32
    dims: [ 1, 2 ] },
  { name: 'J' dims: [ 4 ]
    reshape: { shape: [ ] } }
]
instance_group { count: 2
  rate_limiter { resources [ { name: "r"
    count: 4 } ] }
}
parameters: { key: "x: {" value: { string_value: "a: b { \\" c: 1" } }
response_cache <
  enable: true >
max_batch_size:
  8
"""


def test_the_first_line_of_each_field() -> None:
    lines = field_lines(TEXT)
    assert lines["backend"] == 2
    assert (lines["input"], lines["input.name"], lines["input.dims"], lines["input.reshape"]) == (3, 4, 5, 7)
    assert lines["instance_group.rate_limiter.resources.count"] == 11
    assert (lines["parameters"], lines["parameters.value.string_value"]) == (13, 13)
    assert lines["response_cache.enable"] == 15
    assert lines["max_batch_size"] == 16
    assert not {"x", "a", "b", "c"} & set(lines), "what stands in texts and comments is no field"


def test_every_field_that_protobuf_finds_is_found() -> None:
    config = text_format.Parse(TEXT, ModelConfig())
    paths = {path for path in set_paths(config) if not path.startswith("parameters")}
    assert paths - set(field_lines(TEXT)) == set()


@given(st.text(alphabet='a:{}[]<>"\\#\n ,;1', max_size=60))
def test_whatever_it_is_given_it_raises_nothing(text: str) -> None:
    lines = field_lines(text)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())
