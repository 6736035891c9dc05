"""Templates that try to get out of the sandbox, to never end, or to eat the memory."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from penstock.tokenizers import ChatTemplate, ChatTemplateError, ChatTemplateTimeout
from penstock.tokenizers.render_threads import RenderThreads

MESSAGES = [{"role": "user", "content": "hello"}]


# An interrupt may come while the garbage collector calls Hypothesis: Python reports it only, and it is sent again.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def render(source: str, time_limit: float = 20.0, output_limit: int = 1_000_000) -> str:
    template = ChatTemplate(source)
    return template.render(MESSAGES, add_generation_prompt=False, time_limit=time_limit, output_limit=output_limit)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ messages[0]['__class__'].__base__ }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{m.__class__.__mro__}'.format_map({'m': messages}) }}",
        "{{ (['{0.__class__.__mro__}']|map('format', messages)|first).x.y }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ dict.__class__.mro }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ lipsum() }}",
    ],
)
def test_no_way_out(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_messages_of_the_caller_are_out_of_reach() -> None:
    messages = [{"role": "user", "content": ["a"]}]
    template = ChatTemplate("{% set messages = [] %}{{ messages }}")
    assert template.render(messages, add_generation_prompt=False) == "[]"
    assert messages == [{"role": "user", "content": ["a"]}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** 10000000 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=['aa']) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=['aa']) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x|tojson }}",
        "{% set ns = namespace(x=['aa']) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x|string }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.center(width=10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ 'aaaa'.translate({97: 'b' * 500000}) }}",
        "{{ ('a b ' * 200000).split() }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%(x)1000000000d'|format(x=1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'a\n'|indent(10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ [1]|batch(10**9, 'a')|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ 1|round(10**9, 'ceil') }}",
        "{{ [[1], [2]]|sum(start=[]) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ ('a' * 900000)|list }}",
        "{{ strftime_now('%1000000000d') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'aaaaaaaaaaaaaaaa' }}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}aaaaaaaaaaaaaaaa{% endfor %}{% endset %}",
        "{% macro f() %}{% for i in range(100000) %}aaaaaaaaaaaaaaaa{% endfor %}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='') %}{% for i in range(1000) %}{% set ns.x = 'a' * 900000 %}{% endfor %}",
    ],
)
def test_memory_is_bounded(source: str) -> None:
    with pytest.raises(ChatTemplateError) as refused:
        render(source)
    assert not isinstance(refused.value, ChatTemplateTimeout)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s has %d%%' % ('x', 1000000000) }}", "x has 1000000000%"),
        ("{{ 'in 20260101000000: %05.1f' % 2.5 }}", "in 20260101000000: 002.5"),
        ("{{ '{} * {:>4} {{}}'.format('a', 7) }}", "a *    7 {}"),
        ("{{ 'x'|format }}{{ '%s-%s'|format(1, 2) }}", "x1-2"),
        ("{{ 'a,b'.split(',')|join('-') }}", "a-b"),
        ("{{ messages|map(attribute='role')|join(', ') }}", "user"),
        ("{{ 'ab'|list }}{{ [1, 2]|sum }}{{ 2.567|round(1) }}", "['a', 'b']32.6"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{{ 'aXb'.replace('X', '--') }}{{ 'aXb'|replace('X', '+') }}", "a--ba+b"),
        ("{{ [1] + [2] }}{{ 'ab' * 2 }}{{ 2 * 3 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ 1 ~ none }}", "[1, 2]abab63231None"),
        ("{{ nothing }}{{ nothing ~ 'x' }}{{ nothing|join }}", "x"),
        ("{{ dict(a=1) }}{{ namespace(a=2).a }}", "{'a': 1}2"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "013",
        ),
        ("{{ {'k': '<ä>'}|tojson }}{{ [1, 2]|tojson(separators=(',', ':')) }}", '{"k": "<ä>"}[1,2]'),
        ("{{ {'b': 1, 'a': 2}|tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
    ],
)
def test_what_templates_do_every_day_is_untouched(source: str, text: str) -> None:
    assert render(source) == text


ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{% set x %}" + ENDLESS + "{% endset %}",
        "{% macro f() %}" + ENDLESS + "{% endmacro %}{{ f() }}",
        "{% for i in range(100000) %}{% set x = range(100000)|map('string')|join %}{% endfor %}",
    ],
)
def test_an_endless_template_ends_in_time(source: str) -> None:
    with pytest.raises(ChatTemplateTimeout, match=r"within 0\.2 seconds"):
        render(source, time_limit=0.2, output_limit=10_000_000)
    assert render("{{ messages[0].content }}") == "hello"


def test_the_thread_of_an_interrupted_render_ends() -> None:
    owners = []

    def endless() -> None:
        owners.append(threading.current_thread())
        while True:
            pass

    with pytest.raises(ChatTemplateTimeout):
        RenderThreads().run(endless, 0.05)
    owners[0].join(timeout=10)
    assert not owners[0].is_alive()


def test_threads_are_used_again() -> None:
    threads = RenderThreads()
    seen = set[int]()
    for _ in range(5):
        threads.run(lambda: seen.add(threading.get_ident()), 10.0)
    assert len(seen) == 1


def test_errors_of_the_work_reach_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    threads = RenderThreads()
    with pytest.raises(KeyError):
        threads.run(fail, 10.0)
    threads.run(lambda: None, 10.0)


def test_work_that_cannot_be_interrupted_is_left_behind_and_counted() -> None:
    release = threading.Event()
    owners = []

    def stuck() -> None:
        owners.append(threading.current_thread())
        # A wait without a time limit is one C call, which an exception from outside does not end.
        release.wait()

    threads = RenderThreads(max_stuck=1)
    with pytest.raises(ChatTemplateTimeout, match="did not finish"):
        threads.run(stuck, 0.05)
    with pytest.raises(ChatTemplateTimeout, match="have not ended yet"):
        threads.run(lambda: None, 10.0)
    release.set()
    owners[0].join(timeout=10)
    ran = []
    threads.run(lambda: ran.append(1), 10.0)
    assert ran == [1]


def test_interruptions_at_any_moment_lose_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    threads = RenderThreads(max_stuck=1)

    def interrupt_at_random(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            done: list[int] = []
            with contextlib.suppress(ChatTemplateTimeout):
                threads.run(lambda: done.append(sum(range(draw.randrange(20_000)))), draw.random() * 0.001)  # noqa: B023
                assert done

    callers = [threading.Thread(target=interrupt_at_random, args=(n,)) for n in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    threads.run(lambda: None, 10.0)
    assert not died


def test_many_renders_at_once_with_timeouts_among_them() -> None:
    good, bad = ChatTemplate("{{ messages[0].content }}"), ChatTemplate(ENDLESS)
    results: list[str] = []

    def work(n: int) -> None:
        for _ in range(10):
            if n % 3 == 0:
                with pytest.raises(ChatTemplateTimeout):
                    bad.render(MESSAGES, add_generation_prompt=False, time_limit=0.01)
            else:
                results.append(good.render(MESSAGES, add_generation_prompt=False))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == ["hello"] * 40
