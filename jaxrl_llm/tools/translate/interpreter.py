"""Interprets the syntax tree of a Python training script, and keeps the values of its names. The script is never run.

`jaxrl translate` reads the settings of TRL scripts in this way: code of strangers must not run, and it would need TRL
and a GPU. The value of a name is a literal, a list or dict of values, a `ScriptObject`, or else `Unread`.

- After `rate = 2 * 1e-6`, the value of `rate` is the literal 2e-6.
- After `rate = float(sys.argv[1])`, the value of `rate` is `Unread`.
- After `args = GRPOConfig(beta=0.1)`, the value of `args` is a `ScriptObject` with the key `beta`.
- After `patch(args)`, this object has the step `patch()`, because an unknown function may change its argument.

The base class `Interpreter` follows statements; script_calls.py says what calls of TRL and its companions mean.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.tools.translate.arguments import OPERATORS
from jaxrl_llm.tools.translate.conversions import FILES
from jaxrl_llm.tools.translate.outcome import Unread
from jaxrl_llm.tools.translate.table import WORDS

# {operator of Python: function that computes it for literals}
COMPUTED: dict[type, Callable[..., Any]] = {
    **OPERATORS, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda x, y: x in y, ast.NotIn: lambda x, y: x not in y,
    ast.And: lambda *values: next((value for value in values if not value), values[-1]),
    ast.Or: lambda *values: next((value for value in values if value), values[-1]),
}  # fmt: skip


@dataclass(eq=False)
class ScriptObject:
    """An object of a training script, such as its config, trainer, model or data set.

    kind: "config", "trainer", "model", "rows", "tokenizer" or "adapter" of a training; "class", "function" or "parser";
        "object" of a class of the script; "name" of an import; or "part" of another object, such as `model.lm_head`.
    value: content of the object. For a model it is the path, for rows the data set, for a name what is imported,
        such as "trl.GRPOConfig", and for a part the whole object, which changes with its part.
    keys: {argument or attribute: value}.
    steps: {unknown call that may change the object: its line}.
    node: definition of a class or function, or call that makes the object.
    is_foreign: whether a name is of a package that script_calls.py does not know.
    unsloth: for a name, whether Unsloth was imported before it and has replaced it; `Unread` if a condition decides;
        None if Unsloth may replace it later, as in `trl.GRPOConfig`.
    """

    kind: str
    value: Any = None
    keys: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    node: Any = None
    is_foreign: bool = False
    unsloth: Any = None


def snippet(node: ast.AST) -> str:
    """Returns the source text of a node, in at most 60 letters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def citation(node: ast.AST) -> str:
    """Returns the line and the text of a node, which a report shows."""
    return f"line {getattr(node, 'lineno', 0)}: {snippet(node)}"


def is_literal(value: Any) -> bool:
    """Whether a value and all its elements are literals."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not isinstance(value, Unread | ScriptObject) and all(is_literal(part) for part in parts)


def merged_value(values: list[Any], reason: str) -> Any:
    """Returns the value of a name that has one of several values. reason: line that decides which value."""
    if all(value is values[0] or (is_literal(value) and value == values[0]) for value in values):
        return values[0]
    kind = next((value.kind for value in values if isinstance(value, ScriptObject)), "")
    return ScriptObject(kind, Unread(reason), {}, {"if()": reason}) if kind else Unread(reason)


def with_split(source: Any, split: Any) -> Any:
    """Returns the source of a data set with its split, such as "owner/name@train" of load_dataset(..., split="train").

    source: name of the data set, or the mapping {split: file} of `data_files`. A slice such as "train[:9]" is `Unread`.
    """
    if isinstance(source, dict):
        return source.get(split, Unread(str(split)))
    if not is_literal(source) or "/" not in source or "@" in source or source.endswith(FILES):
        return source
    is_split_name = is_literal(split) and re.fullmatch(r"[\w.-]+", str(split))
    return f"{source}@{split}" if is_split_name else Unread(f"{source}, {split}")


class Interpreter(ABC):
    """Follows statements in the order in which Python runs them. A subclass says what calls mean."""

    def __init__(self, environment: Mapping[str, Any]) -> None:
        self.names: ChainMap[str, Any] = ChainMap()  # values of variables; those of a function hide those of its caller
        self.star_module = ScriptObject("name", "")  # module of `from module import *`
        self.global_names: set[str] = set()  # names that a function of the script declares global
        self.environment = dict(environment)  # environment variables that the command or the script sets
        self.unsloth: Any = False  # whether Unsloth has replaced the classes of TRL; `Unread` if a condition decides
        self.lost: list[str] = []  # lines that change a class or module of another package
        self.unknown_condition = ""  # unknown condition of the block that is followed; "" if the block runs in any case
        self.returned_values: list[Any] = []

    @abstractmethod
    def call(self, node: ast.Call) -> Any:
        """Returns the value of a call, after recording what the call may do to its arguments."""

    @abstractmethod
    def class_of(self, line: ast.ClassDef) -> ScriptObject:
        """Returns the object of a class that the script defines."""

    def follow(self, body: Sequence[ast.AST], condition: str = "") -> None:
        """Follows statements one after the other. condition: unknown condition under which they run, or ""."""
        outer_condition, self.unknown_condition = self.unknown_condition, condition or self.unknown_condition
        for line in body:
            self.statement(line)
        self.unknown_condition = outer_condition

    def statement(self, line: ast.AST) -> None:
        """Follows one statement: binds names, follows the branches of conditions, and records changes of objects."""
        match line:
            case ast.Import() | ast.ImportFrom():
                self.imported(line)
            case ast.FunctionDef(name=name):
                self.bind(ast.Name(name), ScriptObject("function", f"__main__.{name}", node=line))
            case ast.ClassDef(name=name):
                self.bind(ast.Name(name), self.class_of(line))
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                result = self.value(value)
                for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
                    self.bind(target, result)
            case ast.Return(value=value):
                self.returned_values.append(self.value(value) if value else None)
            case ast.If(test=test, body=body, orelse=orelse):
                holds = self.value(test)
                is_main = ast.unparse(test) in ("__name__ == '__main__'", "TYPE_CHECKING")
                if is_main or is_literal(holds):
                    self.follow(body if is_main or holds else orelse)
                else:
                    self.follow(body, f"line {line.lineno}: if {snippet(test)}")
                    self.follow(orelse, f"line {line.lineno}: if not {snippet(test)}")
            case ast.For(target=target, iter=over):
                source = self.value(over)
                self.bind(target, source if isinstance(source, ScriptObject) else Unread(snippet(over)))
                self.follow([*line.body, *line.orelse], f"line {line.lineno}: for {snippet(target)} in {snippet(over)}")
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.global_names |= set(names)
            case ast.AugAssign() | ast.Delete():
                if isinstance(line, ast.AugAssign):
                    self.record_change([self.value(line.value)], "+=", line)
                for target in line.targets if isinstance(line, ast.Delete) else [line.target]:
                    self.bind(target, Unread(citation(line)))
            case _:
                self.parts_of(line)

    def parts_of(self, line: ast.AST) -> None:
        """Follows the expressions and blocks of any other statement, such as `with`, `try` or `while`."""
        always_runs = isinstance(line, ast.With | ast.Try)
        for part in ast.iter_child_nodes(line):
            match part:
                case ast.expr():
                    self.value(part)
                case ast.withitem(context_expr=manager, optional_vars=target):
                    result = self.value(manager)
                    if target:
                        self.bind(target, result)
                case ast.ExceptHandler(body=body) | ast.match_case(body=body):
                    self.follow(body, citation(body[0]))
                case ast.stmt():
                    self.follow([part], "" if always_runs else citation(line))

    def imported(self, line: ast.Import | ast.ImportFrom) -> None:
        """Binds the names of an import to objects of kind "name", which say what was imported."""
        # A relative import is a module of the user, whatever its name is.
        module, is_local = (line.module, line.level > 0) if isinstance(line, ast.ImportFrom) else ("", False)
        for alias in line.names:
            full = ".".join(filter(None, [module, alias.name]))
            package = full.split(".")[0]
            if package == "unsloth":
                self.unsloth = Unread(self.unknown_condition) if self.unknown_condition else True
            foreign = is_local or package not in (*WORDS["known_packages"], *WORDS["quiet_packages"])
            if alias.name == "*" and not self.star_module.is_foreign:
                self.star_module = ScriptObject("name", f"{module}.", is_foreign=foreign)
            # `import a.b` binds the name a.
            binds_package = isinstance(line, ast.Import) and not alias.asname
            name, imported = (package, package) if binds_package else (alias.asname or alias.name, full)
            # `from trl import GRPOConfig` before `import unsloth` binds TRL's own class, which stays as it is.
            self.names[name] = ScriptObject("name", imported, is_foreign=foreign, unsloth=self.unsloth)

    def bind(self, target: ast.expr, value: Any) -> None:
        """Binds a target of an assignment, such as a name, an attribute or a tuple, to a value."""
        match target:
            case ast.Name(id=name):
                values = [self.names.get(name, value), value]
                self.names[name] = merged_value(values, self.unknown_condition) if self.unknown_condition else value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = value if isinstance(value, list) and len(value) == len(targets) else [value] * len(targets)
                for element_target, part in zip(targets, parts, strict=True):
                    self.bind(element_target, part)
            case ast.Attribute(value=owner, attr=attribute):
                self.assign(self.value(owner), attribute, value, target)
            case ast.Subscript(value=owner, slice=index):
                self.assign(self.value(owner), self.value(index), value, target)

    def assign(self, owner: Any, name: Any, value: Any, target: ast.expr) -> None:
        """Sets an attribute of an object, or an entry of a list or dict, whose name or index is `name`."""
        # A value that is set under an unknown condition is unknown, and so is a name that only running could tell.
        value = Unread(self.unknown_condition) if self.unknown_condition else value
        name = name if isinstance(name, str) and is_literal(name) else f"**{snippet(target)}"
        match owner:
            case ScriptObject(kind="class", value=base) if base:  # a trainer or config that the script defines
                owner.steps[f"{name}="] = citation(target)
            case ScriptObject(kind="config" | "object" | "adapter" | "class"):
                owner.keys[name] = value
            case dict():
                owner[name] = value
            case list():
                owner[:] = [Unread(citation(target))]
            case ScriptObject(kind="name", value="os.environ"):
                self.environment[name] = value
            case ScriptObject(kind="name") if owner.value.startswith(tuple(WORDS["patched_packages"])):
                self.lost.append(f"{citation(target)} = ...")
            case _ if name not in WORDS["quiet_attributes"]:
                self.record_change([owner], f"{name}=" if name.isidentifier() else "entry=", target)

    def record_change(self, values: list[Any], name: str, node: ast.AST) -> list[ScriptObject]:
        """Records an unknown call or assignment in all objects that it may change, and returns these objects."""
        objects: list[ScriptObject] = []
        for value in values:
            if isinstance(value, list | dict):
                objects += self.record_change(list(value.values() if isinstance(value, dict) else value), name, node)
            # A change of a part, such as a layer, is a change of the whole object.
            owner = value.value if isinstance(value, ScriptObject) and value.kind == "part" else value
            if isinstance(owner, ScriptObject) and owner.kind not in ("name", "function", "class", "parser"):
                if owner.kind == "object":
                    owner.keys = {key: Unread(citation(node)) for key in owner.keys}
                owner.steps.setdefault(name, citation(node))
                objects.append(owner)
        return objects

    def value(self, node: ast.expr) -> Any:
        """Returns what an expression evaluates to; `Unread` if it cannot be computed without running the script."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                star = ScriptObject("name", "") if hasattr(builtins, name) else self.star_module
                return self.names.get(name, ScriptObject("name", f"{star.value}{name}", is_foreign=star.is_foreign))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return self.elements(elements)
            case ast.Dict(keys=keys, values=parts):
                result: dict[str, Any] = {}
                for key, part in zip(keys, parts, strict=True):
                    name = self.value(key) if key else ""
                    name = name if isinstance(name, str) and is_literal(name) else f"**{snippet(node)}"
                    entries = {name: self.value(part)} if key else self.unpacked(part)
                    # An unknown mapping may change all entries before it.
                    if not key and any(entry.startswith("**") for entry in entries):
                        result = dict.fromkeys(result, Unread(snippet(part)))
                    result |= entries
                return result
            case ast.Attribute(value=owner):
                return self.attribute(self.value(owner), node)
            case ast.Subscript(value=owner, slice=index):
                return self.entry(self.value(owner), self.value(index), node)
            case ast.Call():
                return self.call(node)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.value(value)
            case ast.JoinedStr(values=parts):
                texts = [self.value(part) for part in parts]
                return "".join(map(str, texts)) if is_literal(texts) else Unread(snippet(node))
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp():
                return self.computed(node)
            case ast.IfExp(test=test, body=body, orelse=orelse) if is_literal(holds := self.value(test)):
                return self.value(body if holds else orelse)
            case ast.NamedExpr(target=target, value=value):
                self.bind(target, result := self.value(value))
                return result
        # Any other expression, such as a comprehension, is followed only for its calls. A lambda is not followed,
        # because it may never run.
        for inside in [] if isinstance(node, ast.Lambda) else ast.walk(node):
            if isinstance(inside, ast.Call):
                self.value(inside)
        return Unread(snippet(node))

    def elements(self, nodes: list[ast.expr]) -> list[Any]:
        """Returns the values of a list or of the arguments of a call. An unknown *list is one value."""
        values: list[Any] = []
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node)
            values += value if isinstance(node, ast.Starred) and isinstance(value, list) else [value]
        return values

    def unpacked(self, node: ast.expr) -> dict[str, Any]:
        """Returns the entries of **node. An unknown mapping becomes one unread entry, whose name is no key."""
        value = self.value(node)
        return value if isinstance(value, dict) else {f"**{snippet(node)}": Unread(snippet(node))}

    def arguments(self, node: ast.Call, positional: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the arguments of a call by their names, or by numbers if they have no names."""
        values = self.elements(node.args)
        names = [*positional[: len(values)], *map(str, range(len(positional), len(values)))]
        arguments = dict(zip(names, values, strict=True))
        for keyword in node.keywords:
            arguments |= {keyword.arg: self.value(keyword.value)} if keyword.arg else self.unpacked(keyword.value)
        return arguments

    def attribute(self, owner: Any, node: ast.Attribute) -> Any:
        """Returns the value of `owner.name`."""
        if isinstance(owner, ScriptObject) and owner.kind == "name":
            return ScriptObject("name", f"{owner.value}.{node.attr}", is_foreign=owner.is_foreign)
        if isinstance(owner, ScriptObject) and node.attr in owner.keys:
            return owner.keys[node.attr]
        return self.part(owner, node)

    def part(self, owner: Any, node: ast.AST) -> Any:
        """Returns a part of an object, such as an attribute of a model, whose changes also change the object."""
        if not isinstance(owner, ScriptObject) or getattr(node, "attr", "") in WORDS["plain_attributes"]:
            return Unread(snippet(node))
        return ScriptObject("part", owner.value if owner.kind == "part" else owner, node=node)

    def entry(self, owner: Any, index: Any, node: ast.expr) -> Any:
        """Returns the value of `owner[index]`, such as rows["train"] of a data set; `Unread` if it is unknown."""
        entries = self.environment if isinstance(owner, ScriptObject) and owner.value == "os.environ" else owner
        if isinstance(entries, list | dict) and is_literal(index):
            with suppress(KeyError, IndexError, TypeError):
                return entries[index]
        if isinstance(owner, ScriptObject) and owner.kind == "rows":
            return ScriptObject("rows", with_split(owner.value, index), {}, dict(owner.steps))
        return owner if isinstance(owner, ScriptObject) and owner.kind == "part" else Unread(snippet(node))

    def computed(self, node: ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp) -> Any:
        """Returns the result of an operator; `Unread` if an operand is no literal."""
        values = [self.value(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if not is_literal(values):
            return Unread(snippet(node))
        with suppress(KeyError, TypeError, ValueError, ArithmeticError):
            match node:
                case ast.BinOp(op=op) | ast.UnaryOp(op=op) | ast.BoolOp(op=op) | ast.Compare(ops=[op]):
                    return COMPUTED[type(op)](*values)
        return Unread(snippet(node))
