"""Functions are short, docstrings have subjects, and no two public classes share a name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.package_graph import parsed, statements

ROOT = Path(__file__).parent.parent
MAX_LINES = 80  # of a function; a kernel may have more
OPENINGS = ("Of", "What", "Where", "Which", "As")  # of sentences without a subject
NUM_PARAMETERS = 5  # from which a public function describes each of them

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(*places: str) -> Iterator[tuple[str, ast.Module]]:
    for place in places:
        for file in sorted(ROOT.glob(f"{place}/**/*.py")):
            yield file.relative_to(ROOT).as_posix(), parsed(file)


@cache
def definitions(tree: ast.Module) -> list[ast.Module | ast.ClassDef | Function]:
    """The module, and its classes and functions at any depth: all that have docstrings."""
    kinds = ast.Module | ast.ClassDef | Function
    return [node for node in statements(tree) if isinstance(node, kinds)]


def functions(tree: ast.Module) -> Iterator[Function]:
    yield from (node for node in definitions(tree) if isinstance(node, Function))


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Public functions of a module and public methods of its public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def parameters(function: Function) -> list[str]:
    args = function.args
    some = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, *some)]


def test_no_function_is_longer_than_a_page():
    long = [
        f"{file} {function.name}"
        for file, tree in trees("holmesjax", "launch", "benchmarks", "docs", "tests")
        for function in functions(tree)
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_LINES
    ]
    assert not long


def test_a_public_function_with_many_parameters_describes_them():
    silent = [
        f"{file} {function.name}"
        for file, tree in trees("holmesjax", "launch", "kernels")
        for function in public_functions(tree.body)
        if len({*parameters(function)} - {"self", "cls"}) >= NUM_PARAMETERS
        and "Args:" not in (ast.get_docstring(function) or "")
    ]
    assert not silent


def test_args_name_parameters():
    wrong = [
        f"{file}:{function.lineno} {function.name}: {name}"
        for file, tree in trees("holmesjax", "launch", "kernels")
        for function in functions(tree)
        for name in described(ast.get_docstring(function) or "")
        if name not in parameters(function)
    ]
    assert not wrong


def described(docstring: str) -> list[str]:
    """The names in the `Args:` of a docstring.

    >>> described("Adds.\\n\\nArgs:\\n  a, b: numbers\\n    to add\\n\\nReturns:\\n  c: x")
    ['a', 'b']
    """
    if "Args:\n" not in docstring:
        return []
    block = docstring.split("Args:\n")[1].split("\n\n")[0]
    indent = len(block) - len(block.lstrip())
    lines = [line[indent:] for line in block.splitlines()]
    names = [line.partition(":")[0] for line in lines if line[:1].strip() and ":" in line]
    return [name.strip().lstrip("*") for group in names for name in group.split(",")]


def test_docstrings_name_their_subject_first():
    wrong = [
        f"{file}: {text.splitlines()[0]}"
        for file, tree in trees("holmesjax", "launch", "kernels", "benchmarks", "docs", "tests")
        for node in definitions(tree)
        if (text := ast.get_docstring(node) or "").partition(" ")[0] in OPENINGS
    ]
    assert not wrong


def test_sentences_of_pages_name_their_subject_first():
    """Text, not code, tables and headings; a question may begin with such a word."""
    opening = re.compile(rf"\W*({'|'.join(OPENINGS)})\b")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
    wrong = []
    for file in [*files, *ROOT.glob("docs/*.md"), *ROOT.glob("docs/design/*.md")]:
        text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\||#))", text):
            if not part.lstrip().startswith(("|", "#")):
                sentences = re.split(r"(?<=[.!?]) (?=[A-Z*])", " ".join(part.split()))
                wrong += [
                    f"{file.name}: {sentence}" for sentence in sentences if opening.match(sentence)
                ]
    assert not [sentence for sentence in wrong if not sentence.endswith("?")]


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for file, tree in trees("holmesjax", "launch", "kernels"):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(file)
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared
