"""Follows a Python script along its syntax tree, and knows what its names hold. It is never run.

A value is a literal, a list or dict of values, an `Item`, or `Unread` for all else. An `Item` is an object that may
reach a trainer. It remembers each call and assignment that touches it and that no table knows: none is lost.
"""

from __future__ import annotations

import ast
import builtins
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.tools.translate.arguments import OPERATORS
from jaxrl_llm.tools.translate.outcome import Unread


def words(text: str) -> set[str]:
    return set(text.split())


# Packages whose functions are known by their names. A name without a package is one that the script does not set.
KNOWN = words("trl peft transformers datasets unsloth torch accelerate open_r1 copy argparse dataclasses")
QUIET_PACKAGES = words("logging logger wandb os json sys time random warnings mlflow swanlab pprint rich")
PATCHED = ("trl", "transformers", "peft", "unsloth", "open_r1")  # packages whose classes a script may change
QUIET_ATTRIBUTES = words("use_cache pad_token pad_token_id padding_side truncation_side bos_token_id model_parallel")
COMPUTED: dict[type, Callable[..., Any]] = {
    **OPERATORS, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda x, y: x in y, ast.NotIn: lambda x, y: x not in y,
}  # fmt: skip


@dataclass(eq=False)
class Item:
    """An object of a script.

    kind: "config", "trainer", "model", "rows", "tokenizer", "adapter", "object" of a class of the script, "class",
    "function", "parser", "name" of an import, or "part" of another item: who changes it changes that one. value: where
    it is from; of a part the whole. keys: its arguments. steps: {call: where it stands}. node: its definition or call;
    of a name whether it is of a package that no table knows.
    """

    kind: str
    value: Any = None
    keys: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    node: Any = None


def short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def where(node: ast.AST) -> str:
    return f"line {getattr(node, 'lineno', 0)}: {short(node)}"


def known(value: Any) -> bool:
    """Whether a value is a literal, with all that is in it."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not isinstance(value, Unread | Item) and all(known(part) for part in parts)


def blurred(values: list[Any], why: str) -> Any:
    """Returns what a name holds that has one of several values."""
    if all(value is values[0] or (known(value) and value == values[0]) for value in values):
        return values[0]
    kind = next((value.kind for value in values if isinstance(value, Item)), "")
    return Item(kind, Unread(why), {}, {"if()": why}) if kind else Unread(why)


class Interpreter(ABC):
    """Follows statements in the order in which Python runs them. What a call means is left to who inherits from it."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.star = Item("name", "")  # the module all of whose names are imported
        self.shared: set[str] = set()  # names that a function sets for the whole script
        self.environment: dict[str, Any] = {}  # variables that the script sets
        self.lost: list[str] = []  # lines that change what no object of the script holds
        self.doubt = ""  # the condition of the branch or loop that is followed; "": it is reached for sure
        self.returned: list[Any] = []

    @abstractmethod
    def call(self, node: ast.Call) -> Any:
        """Returns what a call makes, or notes what it may do to the items that it gets."""

    @abstractmethod
    def class_of(self, line: ast.ClassDef) -> Item:
        """Returns a class of the script."""

    def follow(self, body: Sequence[ast.AST], doubt: str = "") -> None:
        before, self.doubt = self.doubt, doubt or self.doubt
        for line in body:
            self.statement(line)
        self.doubt = before

    def statement(self, line: ast.AST) -> None:
        match line:
            case ast.Import() | ast.ImportFrom():
                self.imported(line)
            case ast.FunctionDef(name=name):
                self.bind(ast.Name(name), Item("function", f"__main__.{name}", node=line))
            case ast.ClassDef(name=name):
                self.bind(ast.Name(name), self.class_of(line))
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                result = self.value(value)
                for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
                    self.bind(target, result)
            case ast.Return(value=value):
                self.returned.append(self.value(value) if value else None)
            case ast.If(test=test, body=body, orelse=orelse):
                holds = self.value(test)
                main = ast.unparse(test) in ("__name__ == '__main__'", "TYPE_CHECKING")
                if main or known(holds):
                    self.follow(body if main or holds else orelse)
                else:
                    self.follow(body, f"line {line.lineno}: if {short(test)}")
                    self.follow(orelse, f"line {line.lineno}: if not {short(test)}")
            case ast.For(target=target, iter=over):
                source = self.value(over)
                self.bind(target, source if isinstance(source, Item) else Unread(short(over)))
                self.follow([*line.body, *line.orelse], f"line {line.lineno}: for {short(target)} in {short(over)}")
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.shared |= set(names)
            case ast.AugAssign() | ast.Delete():
                if isinstance(line, ast.AugAssign):
                    self.touch([self.value(line.value)], "+=", line)
                for target in line.targets if isinstance(line, ast.Delete) else [line.target]:
                    self.bind(target, Unread(where(line)))
            case _:
                self.parts_of(line)

    def parts_of(self, line: ast.AST) -> None:
        """Follows the expressions and blocks of any other statement. Those that may not run leave doubt."""
        sure = isinstance(line, ast.With | ast.Try)
        for part in ast.iter_child_nodes(line):
            match part:
                case ast.expr():
                    self.value(part)
                case ast.withitem(context_expr=manager, optional_vars=target):
                    result = self.value(manager)
                    if target:
                        self.bind(target, result)
                case ast.ExceptHandler(body=body) | ast.match_case(body=body):
                    self.follow(body, where(body[0]))
                case ast.stmt():
                    self.follow([part], "" if sure else where(line))

    def imported(self, line: ast.Import | ast.ImportFrom) -> None:
        # A module beside the script is no package, whatever its name is.
        beside = isinstance(line, ast.ImportFrom) and line.level > 0
        for alias in line.names:
            module = line.module if isinstance(line, ast.ImportFrom) else ""
            full = ".".join(filter(None, [module, alias.name]))
            package = full.split(".")[0]
            foreign = beside or package not in KNOWN | QUIET_PACKAGES
            if alias.name == "*" and not self.star.node:
                self.star = Item("name", f"{module}.", node=foreign)
            # `import a.b` sets the name a.
            whole = isinstance(line, ast.Import) and not alias.asname
            name = package if whole else alias.asname or alias.name
            self.names[name] = Item("name", package if whole else full, node=foreign)

    def bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                old = self.names.get(name, value)
                self.names[name] = blurred([old, value], self.doubt) if self.doubt else value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = value if isinstance(value, list) and len(value) == len(targets) else [value] * len(targets)
                for each, part in zip(targets, parts, strict=True):
                    self.bind(each, part)
            case ast.Attribute(value=owner, attr=attribute):
                self.assign(self.value(owner), attribute, value, target)
            case ast.Subscript(value=owner, slice=index):
                self.assign(self.value(owner), self.value(index), value, target)

    def assign(self, owner: Any, name: Any, value: Any, target: ast.expr) -> None:
        """Sets an attribute of an object, or an entry of a list or dict."""
        value = Unread(self.doubt) if self.doubt else value
        name = name if isinstance(name, str) and known(name) else f"**{short(target)}"
        match owner:
            case Item(kind="class", value=base) if base:  # a trainer or config of the script's own
                owner.steps[f"{name}="] = where(target)
            case Item(kind="config" | "object" | "adapter" | "class"):
                owner.keys[name] = value
            case dict():
                owner[name] = value
            case list():
                owner[:] = [Unread(where(target))]
            case Item(kind="name", value="os.environ"):
                self.environment[name] = value
            case Item(kind="name") if owner.value.startswith(PATCHED):
                self.lost.append(f"{where(target)} = ...")
            case _ if name not in QUIET_ATTRIBUTES:
                self.touch([owner], f"{name}=" if name.isidentifier() else "entry=", target)

    def touch(self, values: list[Any], name: str, node: ast.AST) -> list[Item]:
        """Notes on all items among the values that something unknown happens to them. Returns the items."""
        items: list[Item] = []
        for value in values:
            if isinstance(value, list | dict):
                items += self.touch(list(value.values() if isinstance(value, dict) else value), name, node)
            item = value.value if isinstance(value, Item) and value.kind == "part" else value
            if not isinstance(item, Item) or item.kind in ("name", "function", "class", "parser"):
                continue
            if item.kind == "object":
                item.keys = {key: Unread(where(node)) for key in item.keys}
            item.steps.setdefault(name, where(node))
            items.append(item)
        return items

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                star = Item("name", "") if hasattr(builtins, name) else self.star
                return self.names.get(name, Item("name", f"{star.value}{name}", node=star.node))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return self.elements(elements)
            case ast.Dict(keys=keys, values=parts):
                result: dict[str, Any] = {}
                for key, part in zip(keys, parts, strict=True):
                    name = self.value(key) if key else ""
                    name = name if isinstance(name, str) and known(name) else f"**{short(node)}"
                    result |= {name: self.value(part)} if key else self.unpacked(part)
                return result
            case ast.Attribute(value=owner):
                return self.attribute(self.value(owner), node)
            case ast.Subscript(value=owner, slice=index):
                return self.entry(self.value(owner), self.value(index), node)
            case ast.Call():
                return self.call(node)
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp():
                return self.computed(node)
            case ast.NamedExpr(target=target, value=value):
                self.bind(target, result := self.value(value))
                return result
        # Any other expression, such as a comprehension, is followed only for its calls. A lambda is not followed,
        # because it may never run.
        for inside in [] if isinstance(node, ast.Lambda) else ast.walk(node):
            if isinstance(inside, ast.Call):
                self.value(inside)
        return Unread(short(node))

    def elements(self, nodes: list[ast.expr]) -> list[Any]:
        """Returns the values of a list or of the arguments of a call. Those of an unknown *list are one."""
        values: list[Any] = []
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node)
            values += value if isinstance(node, ast.Starred) and isinstance(value, list) else [value]
        return values

    def unpacked(self, node: ast.expr) -> dict[str, Any]:
        """Returns the items of **node; of anything but a dict, itself under a name that no key has."""
        value = self.value(node)
        return value if isinstance(value, dict) else {f"**{short(node)}": Unread(short(node))}

    def arguments(self, node: ast.Call, positional: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns the arguments of a call by their names. Those without one are numbered."""
        values = self.elements(node.args)
        names = [*positional[: len(values)], *map(str, range(len(positional), len(values)))]
        arguments = dict(zip(names, values, strict=True))
        for keyword in node.keywords:
            arguments |= {keyword.arg: self.value(keyword.value)} if keyword.arg else self.unpacked(keyword.value)
        return arguments

    def attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, Item) and owner.kind == "name":
            return Item("name", f"{owner.value}.{node.attr}", node=owner.node)
        if isinstance(owner, Item) and node.attr in owner.keys:
            return owner.keys[node.attr]
        return self.part(owner, node)

    def part(self, owner: Any, node: ast.AST) -> Any:
        """Returns an attribute of an object."""
        whole = owner.value if isinstance(owner, Item) and owner.kind == "part" else owner
        return Item("part", whole, node=node) if isinstance(whole, Item) else Unread(short(node))

    def entry(self, owner: Any, index: Any, node: ast.Subscript) -> Any:
        if isinstance(owner, list | dict) and known(index):
            try:
                return owner[index]
            except (KeyError, IndexError, TypeError):
                pass
        return owner if isinstance(owner, Item) and owner.kind == "part" else Unread(short(node))

    def computed(self, node: ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp) -> Any:
        """Returns the result of an operator on literals."""
        values = [self.value(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if not known(values):
            return Unread(short(node))
        try:
            match node:
                case ast.BinOp(op=op) | ast.UnaryOp(op=op) | ast.Compare(ops=[op]):
                    return COMPUTED[type(op)](*values)
                case ast.BoolOp(op=op):
                    is_or = isinstance(op, ast.Or)
                    return next((value for value in values if bool(value) == is_or), values[-1])
        except (KeyError, TypeError, ValueError, ArithmeticError):
            pass
        return Unread(short(node))
