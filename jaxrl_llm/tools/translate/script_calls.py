"""Meaning of the calls with which a script makes or changes a config, a model, an adapter, rows or a trainer."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

from jaxrl_llm.tools.translate.interpreter import QUIET_PACKAGES, Interpreter, Item, blurred, known, short, where, words
from jaxrl_llm.tools.translate.ours import FILES
from jaxrl_llm.tools.translate.outcome import Unread

CLASSES = {"GRPO": "grpo", "PPO": "ppo", "RLOO": "rloo", "DPO": "dpo", "CPO": "simpo"}
# Until TRL 0.8 the trainer of pairs took these arguments, and those of its loss itself.
CONFIGS = {f"{name}Config": kind for name, kind in CLASSES.items()} | {"TrainingArguments": "dpo"}
TRAINERS = {f"{name}Trainer": kind for name, kind in CLASSES.items()}
OTHERS = ("SFTConfig", "KTOConfig", "RewardConfig", "OnlineDPOConfig", "AsyncGRPOConfig", "OnlineDPOTrainer")
PAIRS = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
POSITIONAL = {  # arguments of a trainer
    **dict.fromkeys(("grpo", "rloo"), ("model", "reward_funcs", "args", "train_dataset")),
    "ppo": ("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model"),
    "dpo": ("model", "ref_model", *PAIRS),
    "simpo": ("model", *PAIRS),
}
FORMER = {"config": "args", "policy": "model", "ref_policy": "ref_model"}  # arguments of PPO and RLOO until 0.21
QUIET = words("""
    print len str repr type isinstance id hasattr getattr dir sum max min any all list enumerate zip sorted range
    generate save_pretrained push_to_hub num_parameters state_dict
    print_trainable_parameters get_nb_trainable_parameters gradient_checkpointing_enable enable_input_require_grads
    apply_chat_template encode decode batch_decode convert_tokens_to_ids tokenize info debug warning error log init
    watch log_metrics set_seed PatchFastRL evaluate to_dict to_json_string asdict get_last_checkpoint iter next
    main_process_first set_verbosity
""")  # functions and methods that leave an object as it is
SAME = words("""
    to cuda cpu eval train compile for_training for_inference create_reference_model prepare_model_for_kbit_training
""")  # return the object
PARTS = words("parameters named_parameters modules named_modules vars")  # of a model or a config
READS = words("keys values items copy index count join format")  # methods of lists and dicts
PARSES = words("parse_args parse_known_args parse_args_into_dataclasses parse_args_and_config")
QUIET_ROWS = words("shuffle remove_columns with_format set_format to_iterable_dataset flatten_indices cast_column")
LOADING = words("path name split streaming num_proc cache_dir trust_remote_code token keep_in_memory")  # of rows
PATHS = ("pretrained_model_name_or_path", "model_name", "path")  # of a model
UNSLOTH_LORA = dict(
    r=16, lora_alpha=16, lora_dropout=0, bias="none",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)  # fmt: skip
MADE = {  # {class: kind of its object, where it is from, arguments by place}
    "LoraConfig": ("adapter", None, ("task_type",)),
    "BitsAndBytesConfig": ("object", "BitsAndBytesConfig", ()),
    "ArgumentParser": ("parser", None, ()),
}
CASTS = {"float": float, "int": int, "str": str, "bool": bool, "list": list}


class TrainingStarts(Exception):
    """The script begins to train, so that its later statements do not change the run."""


def end_of(name: Any) -> str:
    """Returns the last part of the name of a class or function."""
    return str(name).rpartition(".")[2]


def with_split(source: Any, split: Any) -> Any:
    """Adds the split of a data set of the hub, or of a saved folder, that has none yet. A slice of it is `Unread`."""
    if isinstance(source, dict):
        return source.get(split, Unread(str(split)))
    if not known(source) or "/" not in source or "@" in source or source.endswith(FILES):
        return source
    named = known(split) and re.fullmatch(r"[\w.-]+", str(split))
    return f"{source}@{split}" if named else Unread(f"{source}, {split}")


class ScriptRun(Interpreter):
    """The run of a script, with the objects that reach its trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []  # configs and trainers, in the order in which they are made
        self.notes: list[str] = []
        self.depth = 0  # of calls of functions of the script

    def class_of(self, line: ast.ClassDef) -> Item:
        """Returns a class with the defaults of its fields. value: the trainer or config of TRL that it is made of."""
        bases = [base for base in map(self.value, line.bases) if isinstance(base, Item)]
        fields = {name: value for base in bases for name, value in base.keys.items()}
        for entry in line.body:
            match entry:
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    fields[name] = self.value(value) if value else Unread(name)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    fields[name] = self.value(value)
        trl_class = next((base for base in bases if end_of(base.value) in CONFIGS | TRAINERS), None)
        if trl_class is None:
            return Item("class", "", fields, node=line)
        # Whatever the class changes, the run may be another one.
        steps = {f"{line.name}()": f"line {line.lineno}: class {line.name} is made of {trl_class.value}"}
        return Item("class", trl_class.value, fields, trl_class.steps | steps, line)

    def entry(self, owner: Any, index: Any, node: ast.Subscript) -> Any:
        if isinstance(owner, Item) and owner.kind == "rows":
            return Item("rows", with_split(owner.value, index), {}, dict(owner.steps))
        return super().entry(owner, index, node)

    def call(self, node: ast.Call) -> Any:
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        function = self.attribute(owner, node.func) if isinstance(node.func, ast.Attribute) else self.value(node.func)
        match function:
            case Item(kind="function", node=ast.AST()):
                return self.inlined(function.node, self.arguments(node), node)
            case Item(kind="class"):
                return self.instance(function, node)
            case Item(kind="name"):
                return self.named(function, node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else short(node.func)
        return self.method(owner, name, self.arguments(node), node)

    def method(self, owner: Any, name: str, arguments: dict[str, Any], node: ast.Call) -> Any:
        """Returns what a method of an object makes."""
        first = arguments.get("0")
        match owner:
            case list() if name == "append" and not self.doubt:
                return owner.append(first)
            case dict() | list() if name not in READS:  # such as pop or update
                owner.clear()
                changed = Unread(where(node))
                return owner.append(changed) if isinstance(owner, list) else owner.update({f"**{short(node)}": changed})
            case Item(kind="parser"):
                return self.parsed(owner, name, arguments, node)
            case Item(kind="trainer") if name == "train":
                raise TrainingStarts
            case Item(kind="object"):  # its methods are not followed
                return self.changed(name, [owner, *arguments.values()], node)
            case Item(kind="rows"):
                step = {} if name in QUIET_ROWS | QUIET else {name: where(node)}
                return Item("rows", owner.value, {}, owner.steps | step)
        return self.unknown(name, [owner, *arguments.values()], node)

    def unknown(self, name: str, values: list[Any], node: ast.AST) -> Any:
        """Returns what a call makes that no table knows: the first item that it gets, with a step more."""
        if name in QUIET:
            return Unread(short(node))
        if name in SAME:
            return next((value for value in values if isinstance(value, Item)), Unread(short(node)))
        if name in PARTS and values:
            return self.part(values[0], node)
        return self.changed(name, values, node)

    def changed(self, name: str, values: list[Any], node: ast.AST) -> Any:
        """Returns what a call makes that may do anything to the items that it gets."""
        items = self.touch(values, f"{name}()", node)
        return items[0] if items else Unread(short(node))

    def named(self, function: Item, node: ast.Call) -> Any:
        """Returns what a call of an imported name makes, if a table knows it."""
        *parents, name = function.value.split(".")
        foreign, package = bool(function.node), [*parents, name][0]
        trl_class = next((end for end in TRAINERS if name.endswith(end) and name not in OTHERS), "")
        trl_class = name if name in CONFIGS else trl_class
        if trl_class:
            item = self.create(trl_class, node)
            # A class of this kind from elsewhere may do anything in another way.
            if foreign or name != trl_class or (package == "open_r1" and name in TRAINERS):
                item.steps[f"{name}()"] = where(node)
            return item
        if package in QUIET_PACKAGES and not foreign:
            return Unread(short(node))
        if not foreign and (handler := getattr(self, f"call_{name}", None)):
            return handler(parents[-1] if parents else "", node)
        if name in MADE and not foreign:
            kind, value, places = MADE[name]
            return Item(kind, value, self.arguments(node, places))
        arguments = self.arguments(node)
        if name in CASTS and not foreign and known(arguments):
            with suppress(KeyError, TypeError, ValueError):
                return CASTS[name](arguments["0"])
        return (self.changed if foreign else self.unknown)(name, list(arguments.values()), node)

    def create(self, name: str, node: ast.Call) -> Item:
        """Makes a config or a trainer of TRL."""
        kind = (TRAINERS | CONFIGS)[name]
        arguments = self.arguments(node, POSITIONAL[kind] if name in TRAINERS else ("output_dir",))
        if name in TRAINERS:
            arguments = {FORMER.get(key, key): value for key, value in arguments.items()}
        self.items.append(Item("trainer" if name in TRAINERS else "config", kind, arguments, node=node))
        return self.items[-1]

    def instance(self, of: Item, node: ast.Call) -> Any:
        """Returns an object of a class of the script. Of a trainer, each method of the class may change the run."""
        base = end_of(of.value)
        if base in TRAINERS | CONFIGS:
            item = self.create(base, node)
            item.keys = (of.keys if base in CONFIGS else {}) | item.keys
            item.steps |= of.steps
            return item
        arguments = self.arguments(node, tuple(of.keys))
        if any(isinstance(x, ast.FunctionDef) and x.name in ("__init__", "__post_init__") for x in of.node.body):
            self.changed(f"{of.node.name}()", list(arguments.values()), node)
            return Item("object", f"__main__.{of.node.name}")
        keys = of.keys | {name: value for name, value in arguments.items() if name in of.keys}
        return Item("object", f"__main__.{of.node.name}", keys)

    def inlined(self, function: Any, arguments: dict[str, Any], node: ast.AST) -> Any:
        """Follows a function of the script, and returns what it returns."""
        if self.depth > 8:
            return self.changed(short(node), list(arguments.values()), node)
        places = [x.arg for x in [*function.args.posonlyargs, *function.args.args]]
        named = [x.arg for x in function.args.kwonlyargs]
        defaults = [*zip(places[::-1], function.args.defaults[::-1], strict=False)]
        defaults += zip(named, function.args.kw_defaults, strict=True)
        bound = {name: Unread(name) for name in places + named}
        bound |= {name: self.value(default) for name, default in defaults if default}
        free = [name for name in places if name not in arguments]
        bound |= {free[int(k)] if k.isdigit() and int(k) < len(free) else k: x for k, x in arguments.items()}
        before, self.names = self.names, self.names | bound
        returned, self.returned = self.returned, []
        self.depth += 1
        self.follow(function.body)
        self.depth -= 1
        before |= {name: self.names[name] for name in self.shared & self.names.keys()}
        results, self.returned, self.names = self.returned, returned, before
        return blurred(results, f"{short(node)} has several results") if results else None

    def call_from_pretrained(self, parent: str, node: ast.Call) -> Any:
        """A model, tokenizer or processor. Unsloth returns the first two, by default with a base of 4 bits."""
        arguments = self.arguments(node, ("path",))
        if parent.startswith("Peft"):
            adapter = Item("adapter", arguments.get("1", arguments.get("model_id")))
            return self.wrapped(arguments.get("path", arguments.get("model")), adapter, node)
        paths = [arguments.pop(name) for name in PATHS if name in arguments]
        path = paths[0] if paths and not isinstance(paths[0], Item) else Unread(short(node))
        if "Tokenizer" in parent or "Processor" in parent:
            return Item("tokenizer", path, arguments)
        if parent.startswith("Fast"):
            others = any(arguments.get(x) for x in ("load_in_8bit", "load_in_16bit", "full_finetuning"))
            defaults = {"load_in_4bit": not others, "unsloth": True}
            return [Item("model", path, defaults | arguments), Item("tokenizer", path)]
        # The folder of an adapter does not say here what its base is.
        is_model = "Config" not in parent and not parent.startswith("AutoPeft")
        return Item("model", path, arguments) if is_model else Unread(short(node))

    def call_get_peft_model(self, parent: str, node: ast.Call) -> Any:
        """LoRA around a model: PEFT's with a LoraConfig, or Unsloth's with its arguments."""
        arguments = self.arguments(node, ("model", "peft_config"))
        model = arguments.pop("model", None)
        unsloth = Item("adapter", None, UNSLOTH_LORA | arguments)
        return self.wrapped(model, unsloth if parent.startswith("Fast") else arguments.get("peft_config"), node)

    def wrapped(self, model: Any, adapter: Any, node: ast.Call) -> Any:
        if not isinstance(model, Item) or model.kind != "model" or self.doubt or "peft_config" in model.keys:
            return self.unknown("get_peft_model", [model], node)
        model.keys["peft_config"] = adapter
        return model

    def call_load_dataset(self, parent: str, node: ast.Call) -> Any:
        """Returns rows by their name: owner/name:configuration@split, or the file of a format."""
        arguments = self.arguments(node, ("path", "name"))
        source, files, configuration = (arguments.get(name) for name in ("path", "data_files", "name"))
        # load_dataset("json", data_files=...): "json" is a format, the rows are in the file.
        if known(source) and "/" not in str(source) and isinstance(files, str | dict):
            source = files
        # data_dir, revision and files of a data set choose other rows.
        elif not isinstance(source, str) or not known([source, configuration]) or not arguments.keys() <= LOADING:
            return Item("rows", Unread(short(node)))
        elif configuration:
            source = f"{source}:{configuration}"
        return Item("rows", with_split(source, arguments["split"]) if "split" in arguments else source)

    call_load_from_disk = call_load_dataset

    def call_dict(self, parent: str, node: ast.Call) -> Any:
        arguments = self.arguments(node)
        return Unread(short(node)) if "0" in arguments else arguments

    def call_field(self, parent: str, node: ast.Call) -> Any:
        """The default of a field of a dataclass."""
        return self.arguments(node).get("default", Unread(short(node)))

    def call_HfArgumentParser(self, parent: str, node: ast.Call) -> Item:
        classes = self.arguments(node, ("dataclass_types",)).get("dataclass_types")
        return Item("parser", classes if isinstance(classes, list) else [classes])

    call_TrlParser = call_HfArgumentParser

    def parsed(self, parser: Item, name: str, arguments: dict[str, Any], node: ast.Call) -> Any:
        """What a parser returns: the defaults of the options that the script gives it, or of its dataclasses."""
        if name == "add_argument":
            flags = [value for key, value in arguments.items() if key.isdigit() and isinstance(value, str)]
            option = str(arguments.get("dest", next((x for x in flags if x.startswith("--")), (flags or ["-"])[0])))
            switches = {"store_true": False, "store_false": True}
            default = switches.get(str(arguments.get("action")), Unread(f"the option {option}"))
            parser.keys[option.lstrip("-").replace("-", "_")] = arguments.get("default", default)
        elif name == "set_defaults":
            parser.keys |= arguments
        if name not in PARSES:
            return Unread(short(node))
        self.notes.append(f"{where(node)}: an option of the command line has its default here")
        if parser.value is None:
            options = Item("object", short(node), parser.keys)
            return [options, []] if "known" in name else options
        classes = [of for of in parser.value if isinstance(of, Item)]
        return [Unread(short(node)) if of.value else self.instance(of, node) for of in classes]

    def call_get_soft_overlong_punishment(self, parent: str, node: ast.Call) -> Any:
        cache = self.arguments(node, ("max_completion_len", "soft_punish_cache")).get("soft_punish_cache")
        name = f"trl.rewards.get_soft_overlong_punishment({cache})"
        return Item("function", name) if isinstance(cache, int) else cache
