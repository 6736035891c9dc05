"""`penstock serve FOLDER` with a graph that OpenVINO's tools exported in place of safetensors."""

from __future__ import annotations

from pathlib import Path

from support.exported import exported_tokens, write_exported
from support.models import make_tokenizer
from support.server import serving


def test_completions_are_those_of_the_graph_with_and_without_the_cache(tmp_path: Path) -> None:
    folder = write_exported(tmp_path / "exported")
    prompt, tokenizer = "Once upon a time, there was a paged cache", make_tokenizer()
    wanted = exported_tokens(folder, tokenizer(prompt)["input_ids"], 12)
    with serving(str(folder), "--dtype", "f32") as server:
        [model] = server.client().models.list().data
        answers = [
            server.client().completions.create(
                model=model.id, prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
            )
            for _ in range(2)  # with nothing in the cache, and with the prompt in it
        ]
    assert [answer.choices[0].text for answer in answers] == [tokenizer.decode(wanted, skip_special_tokens=True)] * 2
    assert "weights as exported" in "\n".join(server.log)
