"""Generated coding tasks in the form of HumanEval (Chen et al., arXiv 2107.03374): docstring, examples, tests.

HumanEval's own problems are not carried here. What counts for reuse is that agents share code: other tokens, other
line ends and much repetition. The question asks which function does what, so that an answer can be right or wrong
without running a program.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.quality.probes import Question, Step


@dataclass(frozen=True)
class _Function:
    name: str
    does: str
    body: str
    examples: tuple[tuple[str, str], ...]


# First tokens differ: an option is told by its first one.
_FUNCTIONS = (
    _Function("double", "multiplies every number by two", "[2 * x for x in numbers]", (("[1, 4]", "[2, 8]"),)),
    _Function("positive", "keeps the numbers above zero", "[x for x in numbers if x > 0]", (("[-1, 3]", "[3]"),)),
    _Function("total", "adds all numbers up", "sum(numbers)", (("[1, 2, 3]", "6"), ("[]", "0"))),
    _Function("largest", "finds the greatest number", "max(numbers)", (("[4, 9, 2]", "9"),)),
    _Function("reverse", "turns the order of the numbers round", "numbers[::-1]", (("[1, 2, 3]", "[3, 2, 1]"),)),
    _Function("unique", "drops repeated numbers", "list(dict.fromkeys(numbers))", (("[1, 1, 2]", "[1, 2]"),)),
    _Function("ordered", "sorts the numbers", "sorted(numbers)", (("[3, 1, 2]", "[1, 2, 3]"),)),
    _Function("count", "tells how many numbers there are", "len(numbers)", (("[5, 5]", "2"), ("[]", "0"))),
    _Function("square", "multiplies every number by itself", "[x * x for x in numbers]", (("[2, 3]", "[4, 9]"),)),
    _Function("even", "keeps the numbers that two divides", "[x for x in numbers if x % 2 == 0]", (("[1, 2]", "[2]"),)),
    _Function("last", "takes the number at the end", "numbers[-1]", (("[7, 8]", "8"),)),
    _Function("mean", "computes the average", "sum(numbers) / len(numbers)", (("[1, 3]", "2.0"),)),
)


def make_coding(seed: int, functions: int = 5) -> tuple[tuple[str, str], tuple[Question, ...]]:
    """Two documents, a module and its tests, and two questions about the module."""
    rng = random.Random(seed)
    chosen = rng.sample(_FUNCTIONS, functions)
    module = ["from typing import List\n"]
    tests = ["from module import *\n"]
    for one in chosen:
        module.append(f'def {one.name}(numbers: List[int]):\n    """ It {one.does}.')
        module += [f"    >>> {one.name}({given})\n    {result}" for given, result in one.examples]
        module.append(f'    """\n    return {one.body}\n')
        tests.append(f"def test_{one.name}():")
        tests += [f"    assert {one.name}({given}) == {result}" for given, result in one.examples]
        tests.append("")
    names = tuple(one.name for one in chosen)
    questions = tuple(
        Question(
            f"Which function of the module {chosen[i].does}? Give its name.",
            (Step(f"The function that {chosen[i].does} is called", names, i),),
            1,
        )
        for i in rng.sample(range(functions), 2)
    )
    return ("\n".join(module), "\n".join(tests)), questions
