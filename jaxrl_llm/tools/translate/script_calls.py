"""Interprets the calls of a TRL training script, to find the settings that reach its trainer. Nothing is run.

`ScriptRun` follows the syntax tree of the script. A call has one of these values:

- `GRPOConfig(beta=0.1)` makes an object, here of the kind "config" with the key `beta`.
- `get_peft_model(model, config)` has a method `call_get_peft_model` below, which does what the function does.
- `print(model)` is quiet: it changes no object. words.tsv lists such calls.
- `build(model)` of an unknown package may change the model, so the model gets the step `build()`, and is returned.

script.py makes keys of the objects that reach the trainer, which the rules in trl*.py translate.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jaxrl_llm.tools.translate.interpreter import Interpreter, ScriptObject, citation, is_literal, merged_value, snippet
from jaxrl_llm.tools.translate.outcome import Unread
from jaxrl_llm.tools.translate.table import WORDS, read_names

# {beginning of the names of TRL's classes: kind of the trainer, a key of trl.TRL_TRAINERS}
TRAINER_KINDS = {"GRPO": "grpo", "PPO": "ppo", "RLOO": "rloo", "DPO": "dpo", "CPO": "simpo"}
# {config class of TRL: kind of the trainer}. Until TRL 0.8 DPOTrainer took TrainingArguments.
CONFIGS = {f"{name}Config": kind for name, kind in TRAINER_KINDS.items()} | {"TrainingArguments": "dpo"}
# {trainer class of TRL: kind of the trainer}
TRAINERS = {f"{name}Trainer": kind for name, kind in TRAINER_KINDS.items()}
# {argument of TRL's PPO and RLOO until 0.21: its newer name}
RENAMED_ARGUMENTS = {"config": "args", "policy": "model", "ref_policy": "ref_model"}
# {class of PEFT, transformers or argparse: kind of the object that it makes}
MADE = {"LoraConfig": "adapter", "ArgumentParser": "parser", "BitsAndBytesConfig": "object"}
# Conversions of Python that are computed for literals.
CASTS = {"float": float, "int": int, "str": str, "bool": bool, "list": list}


class TrainingStarts(Exception):
    """Ends the interpretation at the script's call of trainer.train(), as later statements cannot change the run."""


def last_part(name: Any) -> str:
    """Returns the last part of a dotted name, such as "GRPOTrainer" of "trl.GRPOTrainer"."""
    return str(name).rpartition(".")[2]


def unread_config(kind: str, node: ast.Call) -> ScriptObject:
    """Returns a config that the script does not make itself, such as one that a parser of the command line returns.

    Its one key begins with "**", and makes all settings unknown but those that the script assigns to the config later.
    kind: a key of trl.TRL_TRAINERS.
    """
    return ScriptObject("config", kind, {f"**{snippet(node)}": Unread(snippet(node))}, node=node)


class ScriptRun(Interpreter):
    """Interprets a Python script of TRL, and collects the configs and trainers that it makes."""

    def __init__(self, options: dict[str, Any] | None, environment: Mapping[str, Any]) -> None:
        super().__init__(environment)
        self.options = options  # options of the command that starts the script; None if no command is known
        self.own_options = dict(options or {})  # options that are no settings of a config of TRL
        self.trl_objects: list[ScriptObject] = []  # configs and trainers, in the order of their calls
        self.notes: list[str] = []

    def class_of(self, line: ast.ClassDef) -> ScriptObject:
        """Returns a class of the script with the defaults of its fields: {"rate": 0.1} for a line `rate: float = 0.1`.

        The value of the class is the trainer or config of TRL from which it is derived, or "".
        """
        bases = [base for base in map(self.value, line.bases) if isinstance(base, ScriptObject)]
        fields = {name: value for base in bases for name, value in base.keys.items()}  # inherited fields
        for entry in line.body:
            match entry:
                case ast.AnnAssign(target=ast.Name(id=name), value=value) | ast.Assign([ast.Name(id=name)], value):
                    fields[name] = self.value(value) if value else Unread(name)
        trl_class = next((base for base in bases if last_part(base.value) in CONFIGS | TRAINERS), ScriptObject("", ""))
        # The methods of a class of TRL may change anything of the run.
        step = f"line {line.lineno}: class {line.name} is made of {trl_class.value}"
        steps = trl_class.steps | {f"{line.name}()": step} if trl_class.value else {}
        return ScriptObject("class", trl_class.value, fields, steps, line)

    def call(self, node: ast.Call) -> Any:
        """Interprets a call by what it calls: a function or class of the script, an imported name or a method."""
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        function = self.attribute(owner, node.func) if isinstance(node.func, ast.Attribute) else self.value(node.func)
        match function:
            case ScriptObject(kind="function", node=ast.AST()):
                names = [x.arg for x in [*function.node.args.posonlyargs, *function.node.args.args]]
                return self.follow_function(function.node, self.arguments(node, names), node)
            case ScriptObject(kind="class"):
                return self.instance(function, node)
            case ScriptObject(kind="name"):
                return self.imported_call(function, node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else snippet(node.func)
        return self.method(owner, name, self.arguments(node), node)

    def method(self, owner: Any, name: str, arguments: dict[str, Any], node: ast.Call) -> Any:
        """Returns the value of a call of a method, and records how it changes its object."""
        match owner:
            case list() if name == "append" and not self.unknown_condition:
                return owner.append(arguments.get("0"))
            case list() if name not in WORDS["reading_methods"]:  # such as insert
                owner[:] = [Unread(citation(node))]
            case dict() if name not in WORDS["reading_methods"]:
                return self.changed_entries(owner, name, arguments, node)
            case ScriptObject(kind="parser"):
                return self.parse_arguments(owner, name, arguments, node)
            case ScriptObject(kind="trainer") if name == "train":
                raise TrainingStarts
            # Methods of classes of the script are not followed.
            case ScriptObject(kind="object"):
                return self.changing_call(name, [owner, *arguments.values()], node)
            case ScriptObject(kind="rows"):
                step = {} if name in (*WORDS["quiet_row_methods"], *WORDS["quiet_calls"]) else {name: citation(node)}
                return ScriptObject("rows", owner.value, {}, owner.steps | step)
        return self.unknown_call(name, [owner, *arguments.values()], node)

    def changed_entries(self, owner: dict[str, Any], name: str, arguments: dict[str, Any], node: ast.Call) -> Any:
        """Returns the value of a method that changes a dict, such as settings.update(beta=0.1) or settings.pop("beta").

        After an unknown change, such as settings.update(build()), all entries are unknown. The new entry "**" stands
        for further keys that the change may have added.
        """
        unread, first = Unread(citation(node)), arguments.pop("0", {})
        has_unknown_entries = any(key.startswith("**") for key in owner)
        if name in ("pop", "setdefault") and isinstance(first, str) and not self.unknown_condition:
            return getattr(owner, name)(first, unread if has_unknown_entries else arguments.get("1"))
        if name == "update" and isinstance(first, dict) and not self.unknown_condition:
            return owner.update(first | arguments)
        return owner.update(dict.fromkeys([*owner, *filter(str.isidentifier, arguments), f"**{snippet(node)}"], unread))

    def unknown_call(self, name: str, values: list[Any], node: ast.AST) -> Any:
        """Interprets a call by its name alone, of which words.tsv has three lists.

        A call such as `print` is quiet. A call such as `model.to("cuda")` returns its object. A call such as
        `model.parameters()` returns parts of its object. Any other call may change the objects among its `values`.
        """
        if name in WORDS["quiet_calls"]:
            return Unread(snippet(node))
        if name in WORDS["identity_calls"]:
            return next((value for value in values if isinstance(value, ScriptObject)), Unread(snippet(node)))
        if name in WORDS["part_calls"] and values:
            return self.part(values[0], node)
        return self.changing_call(name, values, node)

    def changing_call(self, name: str, values: list[Any], node: ast.AST) -> Any:
        """Returns the first object among `values`, after recording in all of them that the call may change them.

        A model that an unknown function gets is probably what the function returns, as in `model = patch(model)`. The
        result of a function of parsed arguments is another object, as in `rewards = get_rewards(script_args)`.
        """
        objects = self.record_change(values, f"{name}()", node)
        return next((changed for changed in objects if changed.kind != "object"), Unread(snippet(node)))

    def imported_call(self, function: ScriptObject, node: ast.Call) -> Any:
        """Interprets a call of an imported name, such as trl.GRPOConfig(...) or AutoTokenizer.from_pretrained(...).

        The name decides what the call means: it makes a config or trainer of TRL, reads or sets an environment
        variable, is quiet, has a method `call_…` of this class, makes an object of `MADE`, or converts a literal. Any
        other call, and each call of a package that is not known, may change the objects of its arguments.
        """
        *parents, name = function.value.split(".")
        foreign, package = function.is_foreign, [*parents, name][0]
        # A trainer such as UnslothGRPOTrainer ends with the name of TRL's trainer.
        trl_class = name if name in CONFIGS else next((end for end in TRAINERS if name.endswith(end)), "")
        if trl_class and name not in WORDS["untranslated_classes"]:
            trl_object = self.create_trl_object(trl_class, node)
            unsloth = self.unsloth if function.unsloth is None else function.unsloth
            trl_object.keys |= {"unsloth": unsloth} if trl_object.kind == "config" and unsloth else {}
            # A trainer of another package, such as `from own import GRPOTrainer`, may change anything of the run.
            if foreign or name != trl_class or (package == "open_r1" and name in TRAINERS):
                trl_object.steps[f"{name}()"] = citation(node)
            return trl_object
        if function.value in ("os.environ.get", "os.getenv"):
            return self.environment_variable(node)
        if function.value == "os.environ.setdefault":
            variable, value = [*self.arguments(node).values(), "", ""][:2]
            self.environment = {str(variable): value} | self.environment
        if function.value == "wandb.init":
            # `wandb.init(project="sums")` names the project: transformers logs to a run that the script has begun.
            self.environment |= {f"WANDB_{key.upper()}": value for key, value in self.arguments(node).items()}
        if package in WORDS["quiet_packages"] and not foreign:
            return Unread(snippet(node))
        if not foreign and (handler := getattr(self, f"call_{name}", None)):
            return handler(parents[-1] if parents else "", node)
        arguments = self.arguments(node)
        if name in MADE and not foreign:
            return ScriptObject(MADE[name], name, arguments)
        if name in CASTS and not foreign and is_literal(arguments):
            with suppress(KeyError, TypeError, ValueError):
                return CASTS[name](*arguments.values())
        return (self.changing_call if foreign else self.unknown_call)(name, list(arguments.values()), node)

    def environment_variable(self, node: ast.Call) -> Any:
        """Interprets os.environ.get("LR", "1e-6"): the value that the variable has, or else the default."""
        name, default = [*self.arguments(node).values(), None, None][:2]
        if name in self.environment:
            return self.environment[name]
        # A launcher such as torchrun sets WORLD_SIZE and LOCAL_RANK, so they do not have the default.
        if default is None or name in WORDS["launcher_variables"]:
            return Unread(snippet(node))
        self.notes.append(f"{citation(node)}: the environment variable is taken to have its default")
        return default

    def create_trl_object(self, name: str, node: ast.Call) -> ScriptObject:
        """Returns a config or trainer of TRL with the arguments of its call, and records it in `trl_objects`."""
        kind = (TRAINERS | CONFIGS)[name]
        arguments = self.arguments(node, WORDS[f"{kind}_arguments"] if name in TRAINERS else ("output_dir",))
        if name in TRAINERS:
            arguments = {RENAMED_ARGUMENTS.get(key, key): value for key, value in arguments.items()}
        self.trl_objects.append(ScriptObject("trainer" if name in TRAINERS else "config", kind, arguments, node=node))
        return self.trl_objects[-1]

    def instance(self, script_class: ScriptObject, node: ast.Call) -> Any:
        """Returns the object that a call of a class of the script makes.

        A class that is derived from GRPOTrainer makes a trainer, and a dataclass makes an object with its fields. A
        class with a method such as __init__ makes an object without known fields, because methods are not followed.
        """
        base = last_part(script_class.value)
        if base in TRAINERS | CONFIGS:
            trl_object = self.create_trl_object(base, node)
            trl_object.keys = (script_class.keys if base in CONFIGS else {}) | trl_object.keys
            trl_object.steps |= script_class.steps
            return trl_object
        arguments = self.arguments(node, tuple(script_class.keys))
        name = script_class.node.name
        methods = {entry.name for entry in script_class.node.body if isinstance(entry, ast.FunctionDef)}
        if methods & {"__init__", "__post_init__"}:
            self.changing_call(f"{name}()", list(arguments.values()), node)
            return ScriptObject("object", f"__main__.{name}")
        keys = script_class.keys | {key: value for key, value in arguments.items() if key in script_class.keys}
        return ScriptObject("object", f"__main__.{name}", keys)

    def follow_function(self, function: Any, arguments: dict[str, Any], node: ast.AST) -> Any:
        """Follows the body of a function of the script with its arguments bound, and returns its value."""
        # A function may call itself, so the interpreter follows at most 9 calls inside each other.
        if len(self.names.maps) > 9:
            return self.changing_call(snippet(node), list(arguments.values()), node)
        positional = [*function.args.posonlyargs, *function.args.args]
        # The last parameters have the defaults.
        defaults = [None] * (len(positional) - len(function.args.defaults)) + function.args.defaults
        parameters = zip([*positional, *function.args.kwonlyargs], defaults + function.args.kw_defaults, strict=True)
        values = {
            parameter.arg: self.value(default) if default else Unread(parameter.arg)
            for parameter, default in parameters
        }
        # The body sees its parameters before the names of the caller, and collects its own returned values.
        self.names = self.names.new_child(values | arguments)
        outer_returned, self.returned_values = self.returned_values, []
        self.follow(function.body)
        inner_names, self.names = self.names, self.names.parents
        # Variables that the function declares global keep their values after the call.
        self.names |= {name: inner_names[name] for name in self.global_names & inner_names.keys()}
        results, self.returned_values = self.returned_values, outer_returned
        return merged_value(results, f"{snippet(node)} has several results") if results else None

    def call_from_pretrained(self, parent: str, node: ast.Call) -> Any:
        """Interprets from_pretrained, by the class that has it: the model, tokenizer or adapter that it loads.

        parent: the class, such as "AutoModelForCausalLM", "AutoTokenizer" or "PeftModel". Unsloth's FastLanguageModel
        returns two objects: a model, which is loaded in 4 bits by default, and its tokenizer.
        """
        arguments = self.arguments(node, ("path",))
        if parent.startswith("Peft"):
            # PeftModel.from_pretrained(model, "adapter folder") has the folder as its second argument, "1".
            adapter = ScriptObject("adapter", arguments.get("1", arguments.get("model_id")))
            return self.add_adapter(arguments.get("path", arguments.get("model")), adapter, node)
        paths = [arguments.pop(name) for name in WORDS["path_arguments"] if name in arguments]
        path = paths[0] if paths and not isinstance(paths[0], ScriptObject) else Unread(snippet(node))
        if "Tokenizer" in parent or "Processor" in parent:
            return ScriptObject("tokenizer", path, arguments)
        if parent.startswith("Fast"):
            other_options = any(arguments.get(x) for x in ("load_in_8bit", "load_in_16bit", "full_finetuning"))
            defaults = {"load_in_4bit": not other_options, "unsloth": True}
            return [ScriptObject("model", path, defaults | arguments), ScriptObject("tokenizer", path)]
        # The folder of an adapter is not read, so its base is unknown.
        is_model = "Config" not in parent and not parent.startswith("AutoPeft")
        return ScriptObject("model", path, arguments) if is_model else Unread(snippet(node))

    def call_get_peft_model(self, parent: str, node: ast.Call) -> Any:
        """Interprets get_peft_model: the model with LoRA, from PEFT's LoraConfig or from Unsloth's arguments."""
        arguments = self.arguments(node, ("model", "peft_config"))
        model = arguments.pop("model", None)
        unsloth = ScriptObject("adapter", "LoraConfig", read_names("unsloth_lora") | arguments)
        return self.add_adapter(model, unsloth if parent.startswith("Fast") else arguments.get("peft_config"), node)

    def add_adapter(self, model: Any, adapter: Any, node: ast.Call) -> Any:
        """Returns the model with its adapter as the key peft_config.

        The adapter may change the model in an unknown way if a condition decides about it, or if it is the second one.
        """
        match model:
            case ScriptObject(kind="model") if not self.unknown_condition and "peft_config" not in model.keys:
                model.keys["peft_config"] = adapter
                return model
        return self.unknown_call("get_peft_model", [model], node)

    def call_load_dataset(self, parent: str, node: ast.Call) -> Any:
        """Interprets load_dataset("owner/name", "main", split="train"): rows of owner/name:main@train.

        The rows of load_dataset("json", data_files="a.jsonl") are those of the file a.jsonl.
        """
        arguments = self.arguments(node, ("path", "name"))
        source, files, configuration = (arguments.get(name) for name in ("path", "data_files", "name"))
        is_understood = arguments.keys() <= set(WORDS["loading_arguments"])
        # load_dataset("json", data_files=...) has the format of the file as its path.
        if is_literal(source) and "/" not in str(source) and isinstance(files, str | dict):
            source = files
        # A computed source is unknown, and arguments such as data_dir and revision choose other rows.
        elif not (isinstance(source, str) and is_literal([source, configuration]) and is_understood):
            return ScriptObject("rows", Unread(snippet(node)))
        elif configuration:
            source = f"{source}:{configuration}"
        rows = ScriptObject("rows", source)
        return self.entry(rows, arguments["split"], node) if "split" in arguments else rows

    call_load_from_disk = call_load_dataset

    def call_partial(self, parent: str, node: ast.Call) -> Any:
        """Interprets partial(function, a=1) of a function of the script, such as a reward with its arguments."""
        arguments = self.arguments(node)
        function = arguments.pop("0", None)
        if isinstance(function, ScriptObject) and function.kind in ("function", "name") and is_literal(arguments):
            text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            return ScriptObject("function", f"{function.value}({text})")
        return self.changing_call("partial", [function, *arguments.values()], node)

    def call_dict(self, parent: str, node: ast.Call) -> Any:
        """Interprets dict(mapping, a=1); a dict of pairs is `Unread`."""
        arguments = self.arguments(node)
        mapping = arguments.pop("0", {})
        return mapping | arguments if isinstance(mapping, dict) else Unread(snippet(node))

    def call_asdict(self, parent: str, node: ast.Call) -> Any:
        """Interprets asdict(object) and vars(object) of an object of the script: its fields."""
        owner = self.arguments(node).get("0")
        if isinstance(owner, ScriptObject) and owner.kind == "object" and owner.keys:
            return dict(owner.keys) if "asdict" in snippet(node) else owner.keys
        return self.part(owner, node)

    call_vars = call_asdict

    def call_field(self, parent: str, node: ast.Call) -> Any:
        """Interprets a dataclass's field(default=...) or field(default_factory=...): the default.

        The factory is a function without arguments, such as `list` or `lambda: [1.0, 0.4]`.
        """
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        factory = keywords.get("default_factory")
        if factory and not isinstance(factory, ast.Lambda):
            return self.call(ast.copy_location(ast.Call(factory, [], []), node))
        default = factory.body if isinstance(factory, ast.Lambda) else keywords.get("default")
        return self.value(default) if default else Unread(snippet(node))

    def call_HfArgumentParser(self, parent: str, node: ast.Call) -> ScriptObject:
        """Interprets a parser of command lines that fills the dataclasses of its argument."""
        classes = self.arguments(node, ("dataclass_types",)).get("dataclass_types")
        return ScriptObject("parser", classes if isinstance(classes, list) else [classes])

    call_TrlParser = call_HfArgumentParser

    def parse_arguments(self, parser: ScriptObject, name: str, arguments: dict[str, Any], node: ast.Call) -> Any:
        """Interprets a method of a parser of the command line.

        `parser.add_argument("--beta", default=0.1)` adds the option beta with its default. `parser.parse_args()`
        returns an object with all options. `HfArgumentParser((Own, GRPOConfig)).parse_args_into_dataclasses()` returns
        a list with one object for each class. The value of an option is that of the command, or else the default.
        """
        if name == "add_argument":
            # The option has the name of `dest`, or of its first long flag, or of its first flag.
            flags = [value for key, value in arguments.items() if key.isdigit() and isinstance(value, str)]
            long_flags = [flag for flag in flags if flag.startswith("--")]
            option = str(arguments.get("dest", [*long_flags, *flags, "-"][0]))
            switches = {"store_true": False, "store_false": True}
            default = switches.get(str(arguments.get("action")), Unread(f"the option {option}"))
            parser.keys[option.lstrip("-").replace("-", "_")] = arguments.get("default", default)
        elif name == "set_defaults":
            parser.keys |= arguments
        if name not in WORDS["parse_methods"]:
            return Unread(snippet(node))
        if self.options is None:
            self.notes.append(f"{citation(node)}: an option of the command line is taken to have its default")
        if parser.value == "ArgumentParser":
            given_options = {option: x for option, x in self.own_options.items() if option in parser.keys}
            options = ScriptObject("object", snippet(node), parser.keys | given_options)
            return [options, []] if "known" in name else options
        entries = [entry for entry in parser.value if isinstance(entry, ScriptObject)]
        own_fields = {field for entry in entries if entry.kind == "class" and not entry.value for field in entry.keys}
        self.own_options = {option: x for option, x in self.own_options.items() if option in own_fields}
        return [self.parsed(entry, node) for entry in entries]

    def parsed(self, entry: ScriptObject, node: ast.Call) -> Any:
        """Returns the object that a parser makes of one of its classes, such as Own or GRPOConfig.

        If the options of the command are known, they win over the defaults of the class.
        """
        name = last_part(entry.value)
        if self.options is None:
            # A config of TRL has all settings of the command line, so only what the script assigns to it is known.
            known = unread_config(CONFIGS[name], node) if name in CONFIGS else Unread(snippet(node))
            return known if entry.value else self.instance(entry, node)
        fields = self.instance(entry, node).keys if entry.kind == "class" and not entry.value else {}
        if name not in CONFIGS:
            return ScriptObject("object", name, read_names("parsed_defaults") | fields | self.options)
        settings = entry.keys | {key: x for key, x in self.options.items() if key not in self.own_options}
        self.trl_objects.append(ScriptObject("config", CONFIGS[name], settings, dict(entry.steps), node))
        return self.trl_objects[-1]

    def call_get_peft_config(self, parent: str, node: ast.Call) -> Any:
        """Interprets TRL's functions that make objects of a parsed ModelConfig, whose options are keys themselves."""
        return Unread(snippet(node)) if self.options is None else None

    call_get_quantization_config = call_get_peft_config
    call_get_kbit_device_map = call_get_peft_config

    def call_get_soft_overlong_punishment(self, parent: str, node: ast.Call) -> Any:
        """Interprets TRL's penalty for long completions: a reward function named with its length."""
        arguments = self.arguments(node, ("max_completion_len", "soft_punish_cache"))
        end, tokens = arguments.get("max_completion_len"), arguments.get("soft_punish_cache")
        if isinstance(end, int) and isinstance(tokens, int):
            return ScriptObject("function", f"trl.rewards.get_soft_overlong_punishment({end}, {tokens})")
        return Unread(snippet(node))
