"""Chat templates that would compute for ever or fill the memory: 82 written down, and others that are drawn.

Each is an expression or a few statements; whether it ends in time, in an error or in a text is the renderer's business.
"""

import random
from typing import Final

_LOOP: Final = "{% set ns = namespace(x=START) %}{% for i in range(TIMES) %}{% set ns.x = STEP %}{% endfor %}"
_TEXT: Final = "('a' * 99999)"
_LIST: Final = "(['ab'] * 99999)"


def _repeated(start: str, times: int, step: str) -> str:
    return _LOOP.replace("START", start).replace("TIMES", str(times)).replace("STEP", step)


_LENGTHS: Final = (
    "'a' * 10 ** 9",
    "[1] * 10 ** 9",
    "('a' * 99999) * 99999",
    "'ab'.replace('a', 'c' * 99999999)",
    f"{_TEXT}.replace('a', 'b' * 99999)",
    f"{_TEXT}.replace('', 'b' * 99999)",
    f"{_TEXT} | replace('a', 'b' * 99999)",
    f"{_LIST} | join('x' * 99999)",
    f"('x' * 99999).join({_LIST})",
    f"({_LIST} * 99) | join(',')",
    "('\t' * 99999).expandtabs(99999)",
    "('\t' * 9999).expandtabs(9999999)",
    "'\t'.expandtabs(10 ** 10)",
    "('\n' * 99999) | indent(99999, true, true)",
    "('\n' * 9999) | indent('x' * 99999, true, true)",
    "('a\n' * 99999) | indent(width=9999)",
    "'%0999999999d' % 1",
    "'%999999999s' % 'x'",
    "'%.999999999f' % 1.5",
    "('%s' * 9999) % ((['x' * 99999] * 9999) | list)",
    "'{:>999999999}'.format('x')",
    "('{0}' * 9999).format('b' * 999999)",
    "('{0:99999}' * 99999).format(1)",
    "'%s' | format('x' * 999999999)",
    f"{_TEXT}.translate({{97: 'b' * 99999}})",
    f"({_TEXT} * 9).translate({{97: 'b' * 9999}})",
    f"{_TEXT} | wordwrap(1, wrapstring='x' * 99999)",
    "('a ' * 99999) | wordwrap(1, true, 'x' * 9999)",
    f"{_TEXT}.encode() * 99999",
    f"({_TEXT}.encode() + {_TEXT}.encode()) * 9999",
    f"{_TEXT}.encode('utf-16') * 99999",
    f"{_LIST} | tojson(indent=9999)",
    f"({_LIST} * 9) | tojson(separators=('x' * 9999, ':'))",
    f"({_TEXT} * 999) | tojson",
    "'x'.zfill(10 ** 9)",
    "'x'.center(10 ** 9)",
    "'x'.rjust(10 ** 9, 'y')",
    f"({_TEXT} * 999) | urlencode",
    "('<' * 9999999) | escape",
    "('&' * 99999999) | e",
    f"{_LIST} | map('replace', 'a', 'b' * 99999) | list",
    f"{_LIST} | map('center', 99999) | list",
    f"{_LIST} | groupby(0)",
    "range(99999) | batch(1, 'x' * 99999) | list",
    "range(99999) | slice(99999) | list",
    f"{_LIST} | map('list') | sum(start=[])",
    "range(99999) | list * 9999",
    f"{_LIST} | sum(start=[])",
    f"{_TEXT} | list | map('upper') | join('x' * 9999)",
    "(range(99999) | list) * 9999 | unique | list",
    f"{_TEXT}.splitlines() * 999999999",
    "('a b ' * 99999).title() * 9999",
    "('a ' * 99999).split() * 9999",
    f"({_TEXT} * 999).upper().lower().swapcase()",
    "(1, 2) * 999999999",
    "2 ** 99999999",
    "(9 ** 99999) * (9 ** 99999)",
    "10 ** 9999 ** 2",
)
"""Templates whose results are long."""
_STATEMENTS: Final = (
    _repeated("'a'", 40, "ns.x ~ ns.x"),
    _repeated("'a'", 40, "ns.x + ns.x"),
    _repeated("[1]", 40, "ns.x + ns.x"),
    _repeated("[1]", 24, "[ns.x, ns.x]") + "{{ ns.x | pprint }}",
    _repeated("[1]", 24, "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    _repeated("[1]", 24, "[ns.x, ns.x]") + "{{ ns.x | string }}",
    _repeated("{'a': 1}", 24, "{'a': ns.x, 'b': ns.x}") + "{{ ns.x }}",
    _repeated("[]", 99999, "ns.x + [i]"),
    _repeated("[]", 9999, "ns.x + ['x'.zfill(99999)]"),
    _repeated("'a'", 99999, "ns.x ~ 'a' * 999"),
    _repeated("'a'", 9999, "(ns.x * 2)[:9999999]"),
    _repeated("'a'", 60, "ns.x.replace('a', 'aaaa')"),
    _repeated("3", 60, "ns.x * ns.x") + "{{ ns.x }}",
    "{% for i in range(9999) %}{% if range(99999) | sort | length %}{% endif %}{% endfor %}",
    "{% for i in range(9999) %}{% if ('a' * 99999 + 'b').count('a' * 4999 + 'b') %}{% endif %}{% endfor %}",
    "{% for i in range(9999) %}{% if range(99999) | sum %}{% endif %}{% endfor %}",
    "{% for i in range(9999) %}{% if range(99999) | reverse | list %}{% endif %}{% endfor %}",
    "{% for i in range(9999) %}{% if 'b' in 'a' * 9999999 %}{% endif %}{% endfor %}",
    "{% for i in range(9999) %}{% if ('a' * 99999) | wordcount %}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
)
TEMPLATES: Final = (*(f"{{{{ ({each}) | length }}}}" for each in _LENGTHS), *_STATEMENTS)

_MADE: Final = (
    *("'a' * {n}", "('ab' * {n})", "'a b\n' * {n}", "'\t' * {n}", "['ab'] * {n}", "range({n}) | list"),
    *("('a' * {n}).encode()", "'%d ' * {n}", "'x'.zfill({n})", "['a' * 999] * {n}"),
)
_OF_TEXT: Final = (
    *("replace('a', 'b' * {m})", "expandtabs({m})", "join(['a' * {m}] * {m})", "center({m})", "zfill({m})"),
    *("translate({{97: 'b' * {m}}})", "split()", "format({m})", "splitlines()", "upper()"),
)
_FILTERS: Final = (
    *("list", "join(',' * {m})", "tojson", "tojson(indent={m})", "pprint", "string", "sort", "unique | list"),
    *("indent({m}, true, true)", "wordwrap(1, true, 'x' * {m})", "batch({m}) | list", "groupby(0)", "urlencode"),
    *(
        "replace('a', 'b' * {m})",
        "center({m})",
        "map('string') | list",
        "escape",
        "title",
        "wordcount",
        "reverse | list",
    ),
)


def drawn_template(chance: random.Random) -> str:
    """Something long, through one to four operations that may make it longer, perhaps again and again."""
    sizes = {"n": 10 ** chance.randint(2, 9), "m": 10 ** chance.randint(1, 6)}
    made = f"({chance.choice(_MADE)})"
    for _ in range(chance.randint(1, 4)):
        made = (
            f"({made}.{chance.choice(_OF_TEXT)})" if chance.random() < 0.4 else f"({made} | {chance.choice(_FILTERS)})"
        )
    made = made.format(**sizes)
    if chance.random() < 0.3:
        return f"{{% for i in range({10 ** chance.randint(1, 4)}) %}}{{% if {made} %}}{{% endif %}}{{% endfor %}}"
    return f"{{{{ {made} | string | length }}}}"
