"""The graph of an ensemble: what is refused, with its edge, and in which order steps can run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.ensemble.plan import EnsemblePlan, Flow, Selection, make_plan
from penstock.engines.errors import InvalidRequestError
from support.classic import model_config


def step(inputs: str, outputs: str, model: str = "m", version: int = -1) -> str:
    """`inputs` and `outputs` are names of the ensemble's tensors."""
    maps = [f'input_map {{ key: "I{n}" value: "{name}" }}' for n, name in enumerate(inputs.split())]
    maps += [f'output_map {{ key: "O{n}" value: "{name}" }}' for n, name in enumerate(outputs.split())]
    return f'step {{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def plan(inputs: str, outputs: str, *steps: str) -> EnsemblePlan:
    tensors = [f'input {{ name: "{name}" }}' for name in inputs.split()]
    tensors += [f'output {{ name: "{name}" }}' for name in outputs.split()]
    return make_plan(model_config('name: "e"', *tensors, f"ensemble_scheduling {{ {' '.join(steps)} }}"))


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([], "must specify 'step' for ensemble 'e'"),
        ([step("x", "y", model="")], "must specify 'model_name' in step 0 of ensemble 'e'"),
        ([step("", "y")], "must specify 'input_map' in step 0 of ensemble 'e'"),
        ([step("x", "")], "must specify 'output_map' in step 0 of ensemble 'e'"),
        ([step("x", "y", version=0)], "model_version in step 0 of ensemble 'e' must be a version or -1"),
        ([step("x z", "y")], r"'z', for input 'I1' of step 0 \(model 'm'\), is neither an input of ensemble 'e' nor"),
        ([step("x", "t"), step("t", "u")], "output 'y' for ensemble 'e' is not written by a step"),
        ([step("x", "y"), step("x", "y")], "'y' can appear in an output map only once .* step 0 .* and of step 1"),
        ([step("x", "y x")], "'x' of ensemble 'e' is an input of it and an output of step 0"),
        ([step("x", "y t")], r"'t' is unused in ensemble 'e': it is an output of step 0 \(model 'm'\)"),
        (
            [step("x b", "a"), step("a", "b y", model="n")],
            r"wait for each other: step 0 \(model 'm'\) <- 'b' <- step 1 \(model 'n'\) <- 'a' <- step 0",
        ),
    ],
)
def test_graphs_that_no_request_could_pass(steps: list[str], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        plan("x", "y", *steps)


def test_an_input_that_no_step_takes() -> None:
    with pytest.raises(InvalidRequestError, match="ensemble input 'z' for ensemble 'e' is not used"):
        plan("x z", "y", step("x", "y"))


def test_only_what_the_outputs_need() -> None:
    found = plan("x", "y z", step("x", "t"), step("t", "y"), step("t", "u"), step("u", "z"))
    assert [each.index for each in found.needed(["y"])] == [0, 1]
    assert [each.index for each in found.needed(["z"])] == [0, 2, 3]
    assert found.models == {"m"}


@st.composite
def graphs(draw: st.DrawFn, *, acyclic: bool) -> list[list[int]]:
    """For each step the steps whose output it takes; all take the ensemble's input as well."""
    count = draw(st.integers(1, 7))
    others = [range(index) if acyclic else range(count) for index in range(count)]
    return [sorted(draw(st.sets(st.sampled_from(among), max_size=3)) if len(among) else []) for among in others]


def plan_of(graph: list[list[int]]) -> EnsemblePlan:
    """Step n writes `tn`; every output is one of the ensemble's."""
    steps = [step(" ".join(["x", *(f"t{n}" for n in sources)]), f"t{index}") for index, sources in enumerate(graph)]
    return plan("x", " ".join(f"t{index}" for index in range(len(graph))), *steps)


@given(graphs(acyclic=False))
def test_exactly_the_cycles_are_refused(graph: list[list[int]]) -> None:
    reached = [set(sources) for sources in graph]
    for _ in graph:
        reached = [sources.union(*(reached[n] for n in sources)) for sources in reached]
    if any(index in sources for index, sources in enumerate(reached)):
        with pytest.raises(InvalidRequestError, match="wait for each other: step"):
            plan_of(graph)
    else:
        plan_of(graph)


@given(graphs(acyclic=True), st.data())
def test_each_step_runs_once_and_as_soon_as_its_inputs_are_there(graph: list[list[int]], data: st.DataObject) -> None:
    """Whatever the order in which steps end; and a tensor is kept exactly as long as it is needed."""
    made = plan_of(graph)
    wanted = data.draw(st.sets(st.sampled_from(made.outputs), min_size=1))
    needed = made.needed(wanted)
    flow = Flow[int](Selection(needed, wanted))
    running = flow.put({"x": -1})
    done: set[int] = set()
    begun = {each.index for each in running}
    while running:
        ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
        taken = flow.take(ended)
        assert taken == {"x": -1} | {f"t{n}": n for n in graph[ended.index]}
        done.add(ended.index)
        ready = flow.put({f"t{ended.index}": ended.index})
        assert not begun & {each.index for each in ready}
        begun |= {each.index for each in ready}
        running += ready
        assert begun == {each.index for each in needed if done.issuperset(graph[each.index])}
    assert done == {each.index for each in needed}
    assert flow.tensors == {name: int(name[1:]) for name in wanted}
