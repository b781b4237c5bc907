"""Write tandem/config/readers.json, which lists the modules that read each key of each command.

    python -m docs.readers

The sources are parsed, not imported. Names are followed if their type is declared: parameters, fields and
attributes annotated with a section (or a class that holds one), and names assigned from these. A property or
method of a section counts for the module that uses it. A whole section counts by its declared type.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import tandem
from tandem.config import explain, tables
from tandem.config.schema import keys
from tandem.config.section import Section

PACKAGE = Path(tandem.__file__).parent

_NAMES = re.compile(r"Config\b|\.config\b")
"""A module without a match uses no section."""

Value = tuple[str, tuple[str, ...]]
"""The name of a class, and the attributes that lead from an instance to the value."""

Values = frozenset[Value]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_NONE: Values = frozenset()


@dataclass
class _Class:
    """A class of the package.

    Attributes:
        bases: names of its base classes.
        attributes: possible values of annotated attributes and of attributes assigned to self.
        methods: its functions and properties.
    """

    bases: tuple[str, ...]
    attributes: dict[str, Values] = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)


def table() -> dict[str, dict[str, list[str]]]:
    """Return the modules that read each key, by command."""
    return {command: readers(root) for command, root in explain.COMMANDS.items()}


@cache
def readers(root: type[Section]) -> dict[str, list[str]]:
    """Return the modules that read each key, by dotted path, in alphabetical order."""
    found: dict[str, set[str]] = {name: set() for name in keys(root)}
    holders = _holders(root)
    for module, start, chain in _reads():
        for at, classes in holders.items():
            name = ".".join([*([at] if at else []), *chain])
            if start in classes and name in found:
                found[name].add(module)
    return {name: sorted(modules) for name, modules in found.items()}


def _holders(root: type[Section]) -> dict[str, frozenset[str]]:
    """Return the sections of a config by path, each with the names of its class and bases."""
    found: dict[str, frozenset[str]] = {}

    def visit(section: type[Section], at: str) -> None:
        found[at] = frozenset(base.__name__ for base in section.__mro__ if issubclass(base, Section))
        for name, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                visit(info.annotation, f"{at}.{name}" if at else name)

    visit(root, "")
    return found


@cache
def _reads() -> frozenset[tuple[str, str, tuple[str, ...]]]:
    """Return triples: module, class of the first section, attributes from there to the key."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(source)
        for path, source in sources.items()
        if _NAMES.search(source)
    }
    code = _Code(trees.values())
    return frozenset(
        (module.removesuffix(".__init__"), *value)
        for module, tree in trees.items()
        if not module.startswith("tandem.config.")
        for value in code.module_reads(tree)
    )


class _Code:
    """The classes and functions of the package, and the keys that they read."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.classes: dict[str, _Class] = {}
        self.returns: dict[str, Values] = {}
        self._using: set[tuple[str, str]] = set()
        self._used: dict[tuple[str, str], frozenset[tuple[str, ...]]] = {}
        nodes = [node for tree in trees for node in tree.body]
        self._bounds: dict[str, list[ast.expr]] = {}
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = _Class(tuple(map(_last_name, node.bases)))
            for name, bound in _type_variable(node):
                self._bounds.setdefault(name, []).append(bound)
        for node in nodes:
            if isinstance(node, Function):
                self.returns[node.name] = self.named(node.returns)
            elif isinstance(node, ast.ClassDef):
                self._declare(node)
        # two passes, because an attribute may be assigned from an attribute of another class
        for _ in range(2):
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    self._assign(node)

    def _declare(self, node: ast.ClassDef) -> None:
        known = self.classes[node.name]
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                known.attributes[part.target.id] = self.named(part.annotation)
            elif isinstance(part, Function):
                known.methods[part.name] = part

    def _assign(self, node: ast.ClassDef) -> None:
        known = self.classes[node.name]
        for method in known.methods.values():
            targets = [pair for pair in _facts(method).assigned if isinstance(pair[0], ast.Attribute)]
            if not targets:
                continue
            scope = _Scope(self, self.parameters(method, node.name))
            scope.bind(method)
            for target, value in targets:
                if isinstance(target, ast.Attribute) and _is_self(target.value):
                    old = known.attributes.get(target.attr, _NONE)
                    known.attributes[target.attr] = old | scope.values(value)

    def named(self, annotation: ast.expr | None) -> Values:
        """Return the classes of the package that an annotation names, outside of containers."""
        if isinstance(annotation, ast.BinOp):
            return self.named(annotation.left) | self.named(annotation.right)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.named(ast.parse(annotation.value, mode="eval").body)
        name = "" if annotation is None else _last_name(annotation)
        if name in self._bounds:
            return frozenset(each for bound in self._bounds[name] for each in self.named(bound))
        return frozenset({(name, ())}) if name in self.classes else _NONE

    def parameters(self, function: Function, owner: str | None = None) -> dict[str, Values]:
        """Return the possible values of a function's parameters."""
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        found = {part.arg: self.named(part.annotation) for part in given}
        if owner is not None and given and given[0].arg == "self":
            found["self"] = frozenset({(owner, ())})
        return found

    def lineage(self, name: str) -> Iterator[str]:
        """Yield a class and its bases, nearest first."""
        if name in self.classes:
            yield name
            for base in self.classes[name].bases:
                yield from self.lineage(base)

    def member(self, owner: str, name: str) -> tuple[Values | None, Function | None]:
        """Return the possible values of an attribute, or the method or property of that name."""
        for each in self.lineage(owner):
            known = self.classes[each]
            if name in known.methods:
                return None, known.methods[name]
            if name in known.attributes:
                return known.attributes[name], None
        return None, None

    def is_section(self, name: str) -> bool:
        return "Section" in self.lineage(name)

    def module_reads(self, tree: ast.Module) -> set[Value]:
        """Return the values that the functions of a module read."""
        found: set[Value] = set()
        for node in tree.body:
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            owner = node.name if isinstance(node, ast.ClassDef) else None
            for part in parts:
                if isinstance(part, Function):
                    found |= self.function_reads(part, self.parameters(part, owner))
        return found

    def function_reads(self, function: Function, given: dict[str, Values]) -> set[Value]:
        scope = _Scope(self, given)
        scope.bind(function)
        return scope.reads(function)

    def used(self, owner: str, name: str) -> frozenset[tuple[str, ...]]:
        """Return what a property or method of a section reads, as attributes from that section."""
        at = (owner, name)
        if at not in self._used and at not in self._using:
            self._using.add(at)
            _, function = self.member(owner, name)
            assert function is not None
            heirs = {
                heir: each.methods[name]
                for heir, each in self.classes.items()
                if heir != owner and name in each.methods and owner in self.lineage(heir)
            }
            self._used[at] = frozenset(
                chain
                for own, each in [(owner, function), *heirs.items()]
                for start, chain in self.function_reads(each, self.parameters(each, own))
                if start == own
            )
        return self._used.get(at, frozenset())


class _Scope:
    """The names in one function and their possible values."""

    def __init__(self, code: _Code, names: dict[str, Values]) -> None:
        self._code, self._names = code, names

    def bind(self, function: Function) -> None:
        """Record the possible values of the names that the function assigns."""
        facts = _facts(function)
        for inner in facts.functions:
            self._names = self._code.parameters(inner) | self._names
        for _ in range(2):
            for target, value in facts.assigned:
                if isinstance(target, ast.Name):
                    old = self._names.get(target.id, _NONE)
                    self._names[target.id] = old | self.values(value)

    def values(self, node: ast.expr) -> Values:
        """Return the possible values of an expression."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, _NONE)
            case ast.Attribute(value=inner, attr=name):
                return frozenset(each for value in self.values(inner) for each in self._step(value, name))
            case ast.IfExp(body=one, orelse=other):
                return self.values(one) | self.values(other)
            case ast.NamedExpr(value=inner):
                return self.values(inner)
            case ast.BoolOp(values=parts):
                return frozenset(each for part in parts for each in self.values(part))
            case ast.Call(func=ast.Name(id=name)):
                made = frozenset({(name, ())}) if name in self._code.classes else _NONE
                return made | self._code.returns.get(name, _NONE)
            case ast.Call(func=ast.Attribute(value=inner, attr=name)):
                return self._returned(inner, name)
        return _NONE

    def _returned(self, inner: ast.expr, name: str) -> Values:
        found: set[Value] = set()
        for value in self.values(inner):
            _, function = self._code.member(self._class_of(value), name)
            if function is not None:
                found |= self._code.named(function.returns)
        return frozenset(found)

    def _class_of(self, value: Value) -> str:
        name, chain = value
        for part in chain:
            held, _ = self._code.member(name, part)
            name = next((each for each, _ in held or ()), "")
        return name

    def _step(self, value: Value, name: str) -> Values:
        """Follow one attribute. From a section, keep the path, which later gives the key."""
        owner = self._class_of(value)
        held, function = self._code.member(owner, name)
        if function is not None:
            is_property = any(_last_name(each).endswith("property") for each in function.decorator_list)
            return self._code.named(function.returns) if is_property else _NONE
        if held and self._code.is_section(owner):
            return frozenset({(value[0], (*value[1], name))})
        return held or _NONE

    def reads(self, function: Function) -> set[Value]:
        """Return the keys that the function reads, each from the section where its path starts."""
        facts = _facts(function)
        found = {each for inner, name in facts.attributes for each in self._read(inner, {name})}
        return found | {each for inner in facts.by_name for each in self._read(inner, facts.words)}

    def _read(self, inner: ast.expr, names: Iterable[str]) -> set[Value]:
        found: set[Value] = set()
        for start, chain in self.values(inner):
            if not self._code.is_section(self._class_of((start, chain))):
                continue
            for name in names:
                *way, leaf = (*chain, *name.split("."))
                owner = self._class_of((start, tuple(way)))
                held, function = self._code.member(owner, leaf)
                if function is not None:
                    found |= {(start, (*way, *each)) for each in self._code.used(owner, leaf)}
                elif held is not None and not held:
                    found.add((start, (*way, leaf)))
        return found


@dataclass(frozen=True)
class _Facts:
    """The relevant parts of a function.

    Attributes:
        assigned: targets and values of assignments.
        attributes: expressions and the names of attributes read from them.
        by_name: expressions whose attributes are read through getattr or attrgetter.
        words: strings in the function, and in the tables of names that it uses.
        functions: functions defined inside it.
    """

    assigned: tuple[tuple[ast.expr, ast.expr], ...]
    attributes: tuple[tuple[ast.expr, str], ...]
    by_name: tuple[ast.expr, ...]
    words: frozenset[str]
    functions: tuple[Function, ...]


@cache
def _facts(function: Function) -> _Facts:
    nodes = list(ast.walk(function))
    by_name, words = [], {node.value for node in nodes if isinstance(node, ast.Constant)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[inner, _]):
                by_name.append(inner)
            case ast.Call(func=ast.Call(func=ast.Name(id="attrgetter")), args=[inner]):
                by_name.append(inner)
            case ast.Name(id=name) if isinstance(table := getattr(tables, name, None), dict):
                words |= {each for each in table.values() if isinstance(each, str)}
    return _Facts(
        tuple(pair for node in nodes for pair in _assigned(node)),
        tuple(
            (n.value, n.attr) for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
        ),
        tuple(by_name),
        frozenset(word for word in words if isinstance(word, str) and word) if by_name else frozenset(),
        tuple(node for node in nodes if isinstance(node, Function) and node is not function),
    )


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets and values of an assignment or of a loop over literals, one by one."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            pairs = [(target, value)]
        case ast.NamedExpr(target=target, value=value):
            pairs = [(target, value)]
        case ast.For(target=target, iter=ast.Tuple(elts=values) | ast.List(elts=values)):
            pairs = [(target, value) for value in values]
        case ast.comprehension(target=target, iter=ast.Tuple(elts=values) | ast.List(elts=values)):
            pairs = [(target, value) for value in values]
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs.extend(zip(target.elts, value.elts, strict=False))
        else:
            yield target, value


def _type_variable(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and bound of a type variable, or the name and members of a union."""
    match node:
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="TypeVar"), keywords=words)
        ):
            yield from ((name, word.value) for word in words if word.arg == "bound")
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.BitOr()) as union):
            yield name, union


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner):
            return _last_name(inner)
    return ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


if __name__ == "__main__":
    explain.READERS.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
