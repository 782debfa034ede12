"""Parse a formula in lme4's notation into target, fixed part, random terms, offset and smooth terms.

A server sends the formula to sites, so it may call only :data:`FUNCTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from fedgp_flower.errors import first_of

FUNCTIONS = ("C", "I", "Treatment", "log", "log10", "log2", "log1p", "exp", "sqrt")
"""Functions that a formula may call, besides ``offset`` and ``s``."""
SITE = "site"
"""Name of the site in a formula."""
QUOTED = r"`(?:[\w .%/°-]|\([\w .%/°-]*\))+`|\"[^\"`\\]*\"|'[^'`\\]*'"
ALLOWED = re.compile(rf"(?:{QUOTED}|(?<![\w.`])\d+\.\d*(?![\w.])|[\w\s+\-*/:^|~(),])*")
"""Characters of a formula. Points are allowed only in numbers, so attributes cannot be accessed."""
WORD = re.compile(rf"({QUOTED}|[^\W\d]\w*|\d[\d.]*(?:[eE]-?\d+)?)(\s*\()?")
GROUP = re.compile(r"(?:`[^`]+`|[^\W\d]\w*)(?:\s*:\s*(?:`[^`]+`|[^\W\d]\w*))*")
MOST_SHOWN = 10
"""Most levels of a column in an error."""
EXAMPLE = "such as 'wheeze ~ smoke * age + (1 + age | child)'"


@dataclass(frozen=True, slots=True)
class RandomTerm:
    """``(effects | group)``: effects of each group are N(0, Σ) with any Σ."""

    effects: str
    group: tuple[str, ...]
    """Columns whose combination of values is the group."""

    @property
    def called(self) -> str:
        """Name of the grouping factor."""
        return ":".join(self.group)


@dataclass(frozen=True, slots=True)
class Formula:
    """The parts of a formula; ``fixed`` and ``effects`` are for formulaic."""

    text: str
    target: str
    fixed: str
    offset: str
    random: tuple[RandomTerm, ...]
    smooths: tuple[tuple[str, ...], ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns of the effects, in order."""
        parts = (self.fixed, *(term.effects for term in self.random), self.offset)
        names = [columns_of(part) for part in parts]
        return tuple(dict.fromkeys(chain(*names, *self.smooths)))

    @property
    def groups(self) -> tuple[str, ...]:
        """Grouping columns."""
        return tuple(dict.fromkeys(name for term in self.random for name in term.group))

    @property
    def categories(self) -> tuple[str, ...]:
        """Columns that ``C(…)`` declares as categorical."""
        named = re.findall(rf"\bC\(\s*({QUOTED}|\w+)", self.text)
        return tuple(dict.fromkeys(name.strip("`") for name in named))

    def unknown_reference(self, levels: Mapping[str, Sequence[str]]) -> str:
        """Say which reference level no site has; empty if there is none. ``levels`` are those of each text column."""
        for name, reference in re.findall(rf"\bC\(\s*({QUOTED}|\w+)\s*,\s*Treatment\(\s*({QUOTED}|\w+)", self.text):
            known = levels.get(name.strip("`"), ())
            if known and reference[1:-1] not in known:  # without quotes it is no level either
                shown = first_of([f"'{level}'" for level in known], MOST_SHOWN)
                return f"`formula`: Treatment({reference}) is no level of {name}; its levels are {shown}"
        return ""


@cache
def parse(text: str) -> Formula:
    """Parse a formula. Raise ValueError if it is invalid."""
    left, tilde, right = text.partition("~")
    odd = [name for name, called in called_in(text) if called and name not in (*FUNCTIONS, "offset", "s")]
    if not tilde or "~" in right or len(columns_of(left)) != 1 or not ALLOWED.fullmatch(text):
        dotted = "; a name with a dot needs backquotes, and `.` for all columns is not known" * ("." in text)
        odd_names = [name for name in re.findall("`[^`]*`", text) if not re.fullmatch(QUOTED, name)]
        marks = "only letters, digits, blanks, pairs of brackets and _.%/°-; rename the column"
        quoted = f"; {odd_names[0]}: a name in backquotes has {marks}" if odd_names else ""
        raise ValueError(f"expected one target, ~ and terms, {EXAMPLE}{quoted or dotted}")
    if not re.fullmatch(r"`[^`]+`|\w+", left.strip()):
        raise ValueError(f"`{left.strip()}` on the left: a formula takes a column as it is; write it into a new column")
    if odd or "__" in text:
        raise ValueError(f"`{''.join(odd[:1]) or '__'}` may not be called; allowed: {', '.join(FUNCTIONS)}, offset, s")
    fixed, random, offsets, smooths = list[str](), list[RandomTerm](), list[str](), list[str]()
    for sign, term in split_terms(right):
        inner = term[1:-1] if term.startswith("(") and term.endswith(")") else ""
        match = re.fullmatch(r"(offset|s)\s*\((.*)\)", term)
        if sign == "-" and ("|" in inner or match):
            raise ValueError(f"`- {term}`: only fixed effects can be taken out")
        if "|" in inner:
            random += random_terms(inner)
        elif match:
            (offsets if match[1] == "offset" else smooths).append(match[2])
        else:
            fixed.append(f"{sign} {term}")
    if re.search(r"\bI\([^()]*\^", text):
        raise ValueError("inside I(…) a power is `**`, not `^`")
    if any("|" in term for term in (*fixed, *offsets, *smooths)):
        raise ValueError(f"a random term needs brackets, {EXAMPLE}")
    inputs = tuple(tuple(name.strip(" `") for name in part.split(",")) for part in smooths)
    offset = " + ".join(f"({part})" for part in offsets)
    [target] = columns_of(left)
    return Formula(text, target, " ".join(fixed).removeprefix("+ ") or "1", offset, tuple(random), inputs)


def random_terms(inner: str) -> Iterator[RandomTerm]:
    """Yield the terms of ``effects | group``: for ``a/b`` those of a and a:b, for ``||`` one for each effect."""
    effects, bars, group = re.match(r"(.*?)(\|\|?)(.*)", inner, re.DOTALL).groups()  # type: ignore[union-attr]
    outer = [part.strip() for part in group.split("/")]
    if not all(GROUP.fullmatch(part) for part in outer) or not effects.strip():
        raise ValueError(f"({inner}) is no random term, {EXAMPLE}; a group is a column, a:b or a/b")
    groups = [tuple(columns_of(":".join(outer[: count + 1]))) for count in range(len(outer))]
    parts = [effects.strip()]
    if bars == "||":
        signed = list(split_terms(effects))
        if any(sign == "-" and name != "1" for sign, name in signed):
            raise ValueError(f"({inner}): only the intercept can be taken out of effects before ||")
        parts = [] if ("+", "0") in signed or ("-", "1") in signed else ["1"]
        parts += [f"0 + {name}" for _, name in signed if name not in {"0", "1"}]
    for named in groups:
        yield from (RandomTerm(part, named) for part in parts)


def split_terms(text: str) -> Iterator[tuple[str, str]]:
    """Yield the terms of a sum with their signs."""
    sign, term, depth = "+", "", 0
    for piece in re.findall(rf"{QUOTED}|.", text, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece in "+-" and depth == 0 and not re.search(r"\d[eE]$", term):
            if term.strip():
                yield sign, term.strip()
            sign, term = piece, ""
        else:
            term += piece
    if depth or not term.strip():
        raise ValueError(f"brackets or terms are missing in {text.strip()!r}")
    yield sign, term.strip()


def called_in(text: str) -> Iterator[tuple[str, bool]]:
    """Yield every name outside of quotes, without backticks, and whether it is called."""
    for word, bracket in WORD.findall(text):
        if word[0] not in "\"'" and not word[0].isdigit():
            yield word.strip("`"), bool(bracket)


def columns_of(text: str) -> list[str]:
    """Return the columns in a part of a formula."""
    return list(dict.fromkeys(name for name, called in called_in(text) if not called))
