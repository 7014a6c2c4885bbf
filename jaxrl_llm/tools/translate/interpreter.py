"""Follows a Python script along its syntax tree, and knows what its names hold. It is never run.

A value is a literal, a list or dict of values, an `Item`, or `Unread` for all else. An `Item` is an object that may
reach a trainer. It remembers each call and assignment that touches it and that no table knows: none is lost.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.tools.translate.arguments import OPERATORS
from jaxrl_llm.tools.translate.ours import FILES
from jaxrl_llm.tools.translate.outcome import Unread

CLASSES = {"GRPO": "grpo", "PPO": "ppo", "RLOO": "rloo", "DPO": "dpo", "CPO": "simpo"}
# Until TRL 0.8 the trainer of pairs took these arguments, and those of its loss itself.
CONFIGS = {f"{name}Config": kind for name, kind in CLASSES.items()} | {"TrainingArguments": "dpo"}
TRAINERS = {f"{name}Trainer": kind for name, kind in CLASSES.items()}
OTHERS = ("SFTConfig", "KTOConfig", "RewardConfig", "OnlineDPOConfig", "AsyncGRPOConfig", "OnlineDPOTrainer")
REWARDED = ("model", "reward_funcs", "args", "train_dataset")
PAIRS = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
POSITIONAL = {  # arguments of a trainer
    **dict.fromkeys(("grpo", "rloo"), REWARDED),
    "ppo": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    "dpo": ("model", "ref_model", *PAIRS),
    "simpo": ("model", *PAIRS),
}


def words(text: str) -> set[str]:
    return set(text.split())


# Packages whose functions are known by their names. A name without a package is one that the script does not set.
KNOWN = words("trl peft transformers datasets unsloth torch accelerate open_r1 copy argparse dataclasses")
QUIET_PACKAGES = words("logging logger wandb os json sys time random warnings mlflow swanlab pprint rich")
QUIET = words("""
    print len str repr type isinstance id hasattr getattr vars dir sum max min any all list enumerate zip sorted range
    generate save_pretrained push_to_hub num_parameters state_dict
    print_trainable_parameters get_nb_trainable_parameters gradient_checkpointing_enable enable_input_require_grads
    apply_chat_template encode decode batch_decode convert_tokens_to_ids tokenize info debug warning error log init
    watch log_metrics set_seed PatchFastRL evaluate to_dict to_json_string asdict get_last_checkpoint iter next
    main_process_first set_verbosity
""")  # functions and methods that leave an object as it is
SAME = words("to cuda cpu eval train compile for_training for_inference create_reference_model")  # return the object
PARTS = words("parameters named_parameters modules named_modules")  # of a model
READS = words("keys values items copy index count join format")  # methods of lists and dicts
PARSES = words("parse_args parse_known_args parse_args_into_dataclasses parse_args_and_config")
QUIET_ROWS = words("shuffle remove_columns with_format set_format to_iterable_dataset flatten_indices cast_column")
LOADING = words("split streaming num_proc cache_dir trust_remote_code token keep_in_memory")  # arguments for rows
QUIET_FIELDS = words("use_cache pad_token pad_token_id padding_side truncation_side bos_token_id model_parallel")
UNSLOTH_LORA = dict(
    r=16, lora_alpha=16, lora_dropout=0, bias="none",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)  # fmt: skip
COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda x, y: x in y, ast.NotIn: lambda x, y: x not in y,
}  # fmt: skip
CASTS: dict[str, Callable[..., Any]] = {"float": float, "int": int, "str": str, "bool": bool, "list": list}


class TrainingStarts(Exception):
    """The script trains: what comes later does not change the run."""


@dataclass(eq=False)
class Item:
    """An object of a script.

    kind: "config", "trainer", "model", "rows", "tokenizer", "adapter", "object" of a class of the script, "class",
    "function", or "name" of an import. value: where it is from. keys: its arguments. steps: {call: where it stands}.
    """

    kind: str
    value: Any = None
    keys: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    node: Any = None

    def copy(self, value: Any) -> Item:
        return Item(self.kind, value, dict(self.keys), dict(self.steps), self.node)


class Attribute(Unread):
    """An attribute of an item: its value is not known, but who changes it changes the item."""

    whole: Item


def short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def where(node: ast.AST) -> str:
    return f"line {getattr(node, 'lineno', 0)}: {short(node)}"


def blurred(values: list[Any], why: str) -> Any:
    """Returns what a name holds that has one of several values."""
    items = [value for value in values if isinstance(value, Item)]
    if not items:
        return Unread(why)
    names = dict.fromkeys(name for item in items for name in item.keys)
    keys = {name: [item.keys.get(name) for item in items] for name in names}
    steps = {name: place for item in items for name, place in item.steps.items()} | {"if()": why}
    same = len(items) == len(values) and all(item.value == items[0].value for item in items)
    sure = {
        name: x[0] if len(items) == len(values) and x.count(x[0]) == len(x) else Unread(why) for name, x in keys.items()
    }
    return Item(items[0].kind, items[0].value if same else Unread(why), sure, steps)


class Interpreter:
    """Follows statements in the order in which Python runs them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.foreign: set[str] = set()  # packages that are imported, and that no table knows
        self.star = ""  # a module all of whose names are imported; "": there is none
        self.shared: set[str] = set()  # names that a function sets for the whole script
        self.environment: dict[str, Any] = {}  # variables that the script sets
        self.notes: list[str] = []
        self.items: list[Item] = []  # configs and trainers, in the order in which they are made
        self.doubt = ""  # the condition of the branch or loop that is followed; "": it is reached for sure
        self.depth = 0
        self.returned: list[Any] = []

    def follow(self, body: list[ast.stmt], doubt: str = "") -> None:
        before, self.doubt = self.doubt, doubt or self.doubt
        for line in body:
            self.statement(line)
        self.doubt = before

    def statement(self, line: ast.stmt) -> None:
        match line:
            case ast.Import() | ast.ImportFrom():
                self.imported(line)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.bind(ast.Name(name), Item("function", f"__main__.{name}", node=line))
            case ast.ClassDef(name=name):
                self.bind(ast.Name(name), self.class_of(line))
            case ast.Assign(targets=targets, value=value):
                result = self.value(value)
                for target in targets:
                    self.bind(target, result)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self.bind(target, self.value(ast.copy_location(ast.BinOp(_load(target), op, value), line)))
            case ast.Expr(value=value):
                self.value(value)
            case ast.Return(value=value):
                self.returned.append(self.value(value) if value else None)
            case ast.If() | ast.For() | ast.AsyncFor() | ast.While() | ast.Try() | ast.TryStar() | ast.Match():
                self.branch(line)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.shared |= set(names)
            case ast.Delete(targets=targets):
                for target in targets:
                    self.bind(target, Unread(where(line)))
            case ast.With(items=managers, body=body) | ast.AsyncWith(items=managers, body=body):
                for manager in managers:
                    result = self.value(manager.context_expr)
                    if manager.optional_vars:
                        self.bind(manager.optional_vars, result)
                self.follow(body)

    def imported(self, line: ast.Import | ast.ImportFrom) -> None:
        for alias in line.names:
            if isinstance(line, ast.Import):
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self.foreign |= {alias.name.split(".")[0]} - KNOWN
                self.names[alias.asname or name] = Item("name", name)
            else:
                full = ".".join(filter(None, [line.module, alias.name]))
                self.foreign |= {full.split(".")[0]} - (set() if line.level else KNOWN)
                if alias.name == "*" and self.star.split(".")[0] not in self.foreign:
                    self.star = f"{line.module}."
                # A module beside the script is no package, whatever its name is.
                self.names[alias.asname or alias.name] = Item("name", full, node=line.level or None)

    def branch(self, line: ast.stmt) -> None:
        """Follows the blocks of a compound statement. Those that may not run leave doubt."""
        match line:
            case ast.If(test=test, body=body, orelse=orelse):
                known = self.value(test)
                main = ast.unparse(test) in ("__name__ == '__main__'", "TYPE_CHECKING")
                if main or not isinstance(known, Unread | Item):
                    self.follow(body if main or known else orelse)
                    return
                self.follow(body, f"line {line.lineno}: if {short(test)}")
                self.follow(orelse, f"line {line.lineno}: if not {short(test)}")
            case ast.For(target=target, iter=over, body=body) | ast.AsyncFor(target=target, iter=over, body=body):
                source = self.value(over)
                self.bind(target, source if isinstance(source, Item | Attribute) else Unread(short(over)))
                self.follow(body, f"line {line.lineno}: for {short(target)} in {short(over)}")
            case ast.While(test=test, body=body):
                self.value(test)
                self.follow(body, f"line {line.lineno}: while {short(test)}")
            case ast.Match(subject=subject, cases=cases):
                self.value(subject)
                for case in cases:
                    self.follow(case.body, f"line {line.lineno}: match {short(subject)}")
            case (
                ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody)
                | ast.TryStar(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody)
            ):
                self.follow(body)
                for handler in handlers:
                    self.follow(handler.body, f"line {handler.lineno}: except")
                self.follow(orelse)
                self.follow(finalbody)

    def class_of(self, line: ast.ClassDef) -> Item:
        """Returns a class of the script with the defaults of its fields. value: the trainer or config it is made of."""
        bases = [base for base in map(self.value, line.bases) if isinstance(base, Item)]
        fields: dict[str, Any] = {}
        for entry in line.body:
            match entry:
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    fields[name] = self.value(value) if value else Unread(name)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    fields[name] = self.value(value)
        known = next((base for base in bases if str(base.value).rpartition(".")[2] in CONFIGS | TRAINERS), None)
        if known is None:
            return Item("class", "", fields, node=line)
        methods = [entry for entry in line.body if isinstance(entry, ast.FunctionDef)]
        steps = {f"{x.name}()": f"line {x.lineno}: class {line.name} has its own {x.name}" for x in methods}
        package = str(known.value).split(".")[0]
        steps |= {} if package not in self.foreign else {f"{line.name}()": f"line {line.lineno}: of {known.value}"}
        return Item("class", known.value, known.keys | fields, known.steps | steps, line)

    def bind(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                old = self.names.get(name, value)
                same = old is value or (type(old) is type(value) and not isinstance(old, Item) and old == value)
                self.names[name] = blurred([old, value], self.doubt) if self.doubt and not same else value
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
        if isinstance(owner, Item) and owner.kind in ("config", "object", "adapter", "class"):
            owner.keys[str(name)] = value
        elif isinstance(owner, dict) and isinstance(name, str):
            owner[name] = value
        elif isinstance(owner, Item) and owner.value == "os.environ":
            self.environment[str(name)] = value
        elif name not in QUIET_FIELDS:
            self.touch([owner], f"{name}=" if isinstance(name, str) else "entry=", target)

    def touch(self, values: list[Any], name: str, node: ast.AST) -> list[Item]:
        """Notes on all items among the values that something unknown happens to them. Returns the items."""
        items: list[Item] = []
        for value in values:
            if isinstance(value, list | dict):
                items += self.touch(list(value.values() if isinstance(value, dict) else value), name, node)
            item = value.whole if isinstance(value, Attribute) else value
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
                return self.names.get(name, Item("name", ("" if hasattr(builtins, name) else self.star) + name))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return [self.value(element) for element in elements]
            case ast.Dict():
                return self.mapping(node)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Subscript(value=owner, slice=index):
                return self.entry(self.value(owner), self.value(index), node)
            case ast.Call():
                return self.call(node)
            case ast.JoinedStr(values=parts):
                return self.text(parts, node)
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp():
                return self.computed(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                known = self.value(test)
                if not isinstance(known, Unread | Item):
                    return self.value(body if known else orelse)
                return blurred([self.value(body), self.value(orelse)], short(node))
            case ast.NamedExpr(target=target, value=value):
                self.bind(target, result := self.value(value))
                return result
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value)
            case ast.Lambda():
                return Unread(short(node))
        for inside in ast.walk(node):  # such as a comprehension
            if isinstance(inside, ast.Call):
                self.value(inside)
        return Unread(short(node))

    def mapping(self, node: ast.Dict) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                values |= self.unpacked(value)
            else:
                name = self.value(key)
                values[name if isinstance(name, str) else short(key)] = self.value(value)
        return values

    def unpacked(self, node: ast.expr) -> dict[str, Any]:
        """Returns the items of **node; of anything but a dict, itself under a name that no key has."""
        value = self.value(node)
        return value if isinstance(value, dict) else {f"**{short(node)}": Unread(short(node))}

    def attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        if isinstance(owner, Item):
            if owner.kind == "name":
                return Item("name", f"{owner.value}.{node.attr}", node=owner.node)
            if node.attr in owner.keys:
                return owner.keys[node.attr]
        return self.part(owner, node)

    def entry(self, owner: Any, index: Any, node: ast.Subscript) -> Any:
        if isinstance(owner, Item) and owner.kind == "rows":
            return owner.copy(with_split(owner.value, index))
        if isinstance(owner, list | dict | str) and not isinstance(owner, Unread) and isinstance(index, int | str):
            try:
                return owner[index]  # pyright: ignore[reportArgumentType, reportCallIssue]
            except (KeyError, IndexError, TypeError):
                return Unread(short(node))
        return owner if isinstance(owner, Attribute) else Unread(short(node))

    def text(self, parts: list[ast.expr], node: ast.expr) -> Any:
        inside = [
            part.value if isinstance(part, ast.FormattedValue) and not part.format_spec else part for part in parts
        ]
        values = [self.value(part) for part in inside if not isinstance(part, ast.FormattedValue)]
        known = len(values) == len(parts) and not any(isinstance(value, Unread | Item) for value in values)
        return "".join(map(str, values)) if known else Unread(short(node))

    def computed(self, node: ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp) -> Any:
        """Returns the result of an operator on literals."""
        values = [self.value(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        compares_none = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot) and None in values
        if any(
            isinstance(x, Unread) or (isinstance(x, Item) and not (compares_none and x.kind != "name")) for x in values
        ):
            return Unread(short(node))
        try:
            match node:
                case ast.BinOp(op=op):
                    return OPERATORS[type(op)](*values)
                case ast.UnaryOp(op=op):
                    return (operator.neg if isinstance(op, ast.USub) else operator.not_)(values[0])
                case ast.Compare(ops=[op]):
                    return COMPARISONS[type(op)](*values)
                case ast.BoolOp(op=op):
                    is_or = isinstance(op, ast.Or)
                    return next((value for value in values if bool(value) == is_or), values[-1])
        except (KeyError, TypeError, ValueError, ArithmeticError):
            pass
        return Unread(short(node))

    def arguments(self, node: ast.Call, positional: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns the arguments of a call by their names. Those without one are numbered."""
        values = [self.value(argument) for argument in node.args]
        names = [*positional[: len(values)], *map(str, range(len(positional), len(values)))]
        arguments = dict(zip(names, values, strict=True))
        for keyword in node.keywords:
            arguments |= {keyword.arg: self.value(keyword.value)} if keyword.arg else self.unpacked(keyword.value)
        return arguments

    def call(self, node: ast.Call) -> Any:
        """Returns what a call makes, or notes what it may do to the items that it gets."""
        function = self.value(node.func)
        if isinstance(function, Item) and function.kind == "function" and function.node:
            return self.inlined(function.node, self.arguments(node), node)
        if isinstance(function, Item) and function.kind == "class" and function.node:
            return self.instance(function, node)
        if isinstance(function, Item) and function.kind == "name":
            package, _, name = str(function.value).partition(".")
            name = name.rpartition(".")[2] or package
            if package in QUIET_PACKAGES:
                return Unread(short(node))
            return self.named(function, name, node, known=not (package in self.foreign or function.node))
        name = node.func.attr if isinstance(node.func, ast.Attribute) else short(node.func)
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        return self.method(owner, name, node)

    def method(self, owner: Any, name: str, node: ast.Call) -> Any:
        arguments = self.arguments(node)
        if isinstance(owner, list) and name in ("append", "extend"):
            added = arguments.get("0") if name == "extend" else [arguments.get("0")]
            owner += added if isinstance(added, list) and not self.doubt else [Unread(self.doubt or short(node))]
            return None
        if isinstance(owner, dict) and name == "update":
            owner |= arguments.get("0", {}) if isinstance(arguments.get("0"), dict) else {}
            owner |= {key: Unread(self.doubt) if self.doubt else x for key, x in arguments.items() if key != "0"}
            return None
        if isinstance(owner, dict) and name == "get":
            return owner.get(arguments.get("0"), arguments.get("1"))
        if isinstance(owner, dict | list) and name not in READS:  # such as pop
            changed = {f"**{short(node)}": Unread(where(node))}
            owner.clear()
            return owner.update(changed) if isinstance(owner, dict) else owner.extend(changed.values())
        if isinstance(owner, Item) and owner.kind == "parser":
            return self.parsed(owner, name, node)
        if isinstance(owner, Item) and owner.kind == "trainer" and name == "train":
            raise TrainingStarts
        if isinstance(owner, Item) and owner.kind == "trainer" and name == "add_callback" and not self.doubt:
            owner.keys["callbacks"] = [
                *(owner.keys.get("callbacks") or []),
                arguments.get("0", arguments.get("callback")),
            ]
            return None
        if isinstance(owner, Item) and owner.kind == "object" and owner.node:
            body = [x for x in owner.node.body if isinstance(x, ast.FunctionDef) and x.name == name]
            if body:
                return self.inlined(body[0], {"self": owner} | arguments, node)
        if isinstance(owner, Item) and owner.kind == "rows":
            copy = owner.copy(owner.value)
            copy.steps |= {} if name in QUIET_ROWS | QUIET else {name: where(node)}
            return copy
        return self.unknown(name, [owner, *arguments.values()], node)

    def unknown(self, name: str, values: list[Any], node: ast.Call) -> Any:
        """Returns what a call makes that no table knows: the first item that it gets, with a step more."""
        if name in QUIET:
            return Unread(short(node))
        if name in SAME:
            return next((value for value in values if isinstance(value, Item)), Unread(short(node)))
        if name in PARTS and values:
            return self.part(values[0], node)
        items = self.touch(values, f"{name}()", node)
        return items[0] if items else Unread(short(node))

    def part(self, owner: Any, node: ast.AST) -> Any:
        """Returns an attribute of an object: who changes it changes the object."""
        whole = owner.whole if isinstance(owner, Attribute) else owner
        if not isinstance(whole, Item):
            return Unread(short(node))
        part = Attribute(short(node))
        part.whole = whole
        return part

    def named(self, function: Item, name: str, node: ast.Call, *, known: bool) -> Any:
        """Returns what a call of an imported name makes, if a table knows it."""
        kind = next((kind for end, kind in TRAINERS.items() if name.endswith(end) and name not in OTHERS), "")
        if kind:
            trainer = self.create("trainer", kind, POSITIONAL[kind], node)
            # A class of this kind from elsewhere may do anything in another way.
            known = known and name in TRAINERS and not str(function.value).startswith("open_r1")
            trainer.steps |= {} if known else {f"{name}()": where(node)}
            return trainer
        if name in CONFIGS:
            config = self.create("config", CONFIGS[name], ("output_dir",), node)
            config.steps |= {} if known else {f"{name}()": where(node)}
            return config
        handler = getattr(self, f"call_{name}", None) if known else None
        if handler:
            return handler(str(function.value).split(".")[:-1], node)
        arguments = self.arguments(node)
        cast = arguments.get("0")
        if name == "dict" and known:
            return (
                arguments
                if "0" not in arguments
                else {**cast, **arguments}
                if isinstance(cast, dict)
                else Unread(short(node))
            )
        if name in CASTS and known and len(arguments) == 1 and not isinstance(cast, Unread | Item):
            try:
                return CASTS[name](cast)
            except (TypeError, ValueError):
                return Unread(short(node))
        return self.unknown(name, list(arguments.values()), node)

    def create(self, kind: str, value: str, positional: tuple[str, ...], node: ast.Call) -> Item:
        item = Item(kind, value, self.arguments(node, positional), node=node)
        self.items.append(item)
        return item

    def instance(self, of: Item, node: ast.Call) -> Any:
        """Returns an object of a class of the script. Of a trainer, each method of the class may change the run."""
        base = str(of.value).rpartition(".")[2]
        methods = {x.name: x for x in of.node.body if isinstance(x, ast.FunctionDef)}
        if base in TRAINERS | CONFIGS:
            kind = (TRAINERS | CONFIGS)[base]
            places = POSITIONAL[kind] if base in TRAINERS else ("output_dir",)
            item = self.create("trainer" if base in TRAINERS else "config", kind, places, node)
            item.keys = (of.keys if base in CONFIGS else {}) | item.keys
            item.steps |= of.steps
            return item
        item = Item("object", f"__main__.{of.node.name}", dict(of.keys), node=of.node)
        if "__init__" in methods:
            self.inlined(methods["__init__"], {"self": item} | self.arguments(node), node)
        else:
            arguments = self.arguments(node, tuple(of.keys))
            item.keys |= {name: value for name, value in arguments.items() if name in of.keys}
        return item

    def inlined(self, function: Any, arguments: dict[str, Any], node: ast.AST) -> Any:
        """Follows a function of the script, and returns what it returns."""
        if self.depth > 8:
            return Unread(short(node))
        parameters = [*function.args.posonlyargs, *function.args.args]
        defaults = [*function.args.defaults, *(x for x in function.args.kw_defaults)]
        optional = [*parameters[len(parameters) - len(function.args.defaults) :], *function.args.kwonlyargs]
        bound = {x.arg: Unread(x.arg) for x in [*parameters, *function.args.kwonlyargs]}
        bound |= {x.arg: self.value(value) for x, value in zip(optional, defaults, strict=True) if value}
        names = [x.arg for x in parameters if x.arg not in arguments]
        bound |= {names[int(k)] if k.isdigit() and int(k) < len(names) else k: value for k, value in arguments.items()}
        before, self.names = self.names, self.names | bound
        returned, self.returned = self.returned, []
        self.depth += 1
        self.follow(function.body)
        self.depth -= 1
        before |= {name: self.names[name] for name in self.shared & self.names.keys()}
        results, self.returned, self.names = self.returned, returned, before
        same = all(result is results[0] for result in results)
        return None if not results else results[0] if same else blurred(results, f"{short(node)} has several results")

    def call_from_pretrained(self, owner: list[str], node: ast.Call) -> Any:
        """A model, tokenizer or processor. Unsloth returns the first two, by default with a base of 4 bits."""
        arguments = self.arguments(node, ("path",))
        name = owner[-1] if owner else ""
        if name.startswith("Peft"):
            return self.wrapped(
                arguments.get("path", arguments.get("model")),
                Item("adapter", arguments.get("1", arguments.get("model_id"))),
                node,
            )
        path = next(
            (arguments.pop(x) for x in ("pretrained_model_name_or_path", "model_name", "path") if x in arguments), None
        )
        path = Unread(short(node)) if path is None or isinstance(path, Item) else path
        if "Tokenizer" in name or "Processor" in name:
            return Item("tokenizer", path, arguments)
        if name.startswith("Fast"):
            others = any(arguments.get(x) for x in ("load_in_8bit", "load_in_16bit", "full_finetuning"))
            return [
                Item("model", path, {"load_in_4bit": not others, "unsloth": True} | arguments),
                Item("tokenizer", path),
            ]
        if name.startswith("AutoPeft"):
            return Item("model", Unread(short(node)), arguments, {f"{name}()": where(node)})
        return Item("model", path, arguments) if "Config" not in name else Unread(short(node))

    def call_get_peft_model(self, owner: list[str], node: ast.Call) -> Any:
        """LoRA around a model: PEFT's with a LoraConfig, or Unsloth's with its arguments."""
        arguments = self.arguments(node, ("model", "peft_config"))
        unsloth = owner[-1:] and owner[-1].startswith("Fast")
        model = arguments.pop("model", None)
        return self.wrapped(
            model, Item("adapter", None, UNSLOTH_LORA | arguments) if unsloth else arguments.get("peft_config"), node
        )

    def wrapped(self, model: Any, adapter: Any, node: ast.Call) -> Any:
        if not isinstance(model, Item) or self.doubt or "peft_config" in model.keys:
            return self.unknown("get_peft_model", [model], node)
        model.keys["peft_config"] = adapter
        return model

    def call_prepare_model_for_kbit_training(self, owner: list[str], node: ast.Call) -> Any:
        model = self.arguments(node, ("model",)).get("model")
        if isinstance(model, Item):
            model.keys["prepare_model_for_kbit_training"] = True
        return model

    def call_LoraConfig(self, owner: list[str], node: ast.Call) -> Item:
        return Item("adapter", None, self.arguments(node, ("task_type",)))

    def call_BitsAndBytesConfig(self, owner: list[str], node: ast.Call) -> Item:
        return Item("object", "BitsAndBytesConfig", self.arguments(node))

    def call_load_dataset(self, owner: list[str], node: ast.Call) -> Any:
        """Returns rows by their name: owner/name:configuration@split, or the file of a format."""
        arguments = self.arguments(node, ("path", "name"))
        source, files, configuration = arguments.get("path"), arguments.get("data_files"), arguments.get("name")
        if not isinstance(source, str) or isinstance(source, Unread):
            return Item("rows", Unread(short(node)))
        # load_dataset("json", data_files=...): "json" is a format, the rows are in the file.
        if "/" not in source and isinstance(files, str | dict):
            return Item("rows", with_split(files, arguments["split"]) if "split" in arguments else files)
        # data_dir, revision and files of a data set choose other rows.
        if isinstance(configuration, Unread | Item) or not arguments.keys() <= {"path", "name", *LOADING}:
            return Item("rows", Unread(short(node)))
        source = f"{source}:{configuration}" if isinstance(configuration, str) else source
        return Item("rows", with_split(source, arguments["split"]) if "split" in arguments else source)

    call_load_from_disk = call_load_dataset

    def call_field(self, owner: list[str], node: ast.Call) -> Any:
        """The default of a field of a dataclass."""
        return self.arguments(node).get("default", Unread(short(node)))

    def call_ArgumentParser(self, owner: list[str], node: ast.Call) -> Item:
        return Item("parser")

    def call_HfArgumentParser(self, owner: list[str], node: ast.Call) -> Item:
        classes = self.arguments(node, ("dataclass_types",)).get("dataclass_types")
        return Item("parser", classes if isinstance(classes, list) else [classes])

    call_TrlParser = call_HfArgumentParser

    def parsed(self, parser: Item, name: str, node: ast.Call) -> Any:
        """What a parser returns: the defaults of the options that the script gives it, or of its dataclasses."""
        if name == "add_argument":
            arguments = self.arguments(node)
            flags = [value for key, value in arguments.items() if key.isdigit() and isinstance(value, str)]
            option = str(arguments.get("dest", next((x for x in flags if x.startswith("--")), (flags or ["-"])[0])))
            action = str(arguments.get("action", ""))
            default = {"store_true": False, "store_false": True}.get(action, Unread(f"the option {option}"))
            parser.keys[option.lstrip("-").replace("-", "_")] = arguments.get("default", default)
            return None
        if name == "set_defaults":
            parser.keys |= self.arguments(node)
        if name not in PARSES:
            return Unread(short(node))
        self.notes.append(f"{where(node)}: an option of the command line has its default here")
        if parser.value is None:
            options = Item("object", short(node), parser.keys)
            return [options, []] if "known" in name else options
        classes = [of for of in parser.value if isinstance(of, Item)]
        return [
            Item("object", short(node), dict(of.keys), node=of.node)
            if of.kind == "class" and not of.value
            else Unread(short(node))
            for of in classes
        ]

    def call_get_soft_overlong_punishment(self, owner: list[str], node: ast.Call) -> Any:
        cache = self.arguments(node, ("max_completion_len", "soft_punish_cache")).get("soft_punish_cache")
        return (
            Item("function", f"trl.rewards.get_soft_overlong_punishment({cache})") if isinstance(cache, int) else cache
        )


def with_split(source: Any, split: Any) -> Any:
    """Adds the split of a data set of the hub, or of a saved folder, that has none yet. A slice of it is `Unread`."""
    if isinstance(source, dict):
        return source.get(split, Unread(str(split)))
    if not isinstance(source, str) or isinstance(source, Unread):
        return source
    if "/" not in source or "@" in source or source.endswith(FILES):
        return source
    known = isinstance(split, str) and not isinstance(split, Unread) and re.fullmatch(r"[\w.-]+", split)
    return f"{source}@{split}" if known else Unread(f"{source}, {split}")


def _load(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
