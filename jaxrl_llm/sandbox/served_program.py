"""The program's side of the link: runs the untrusted program, and answers the calls of the judge.

This code shares the program's process, so the program can change it. The verdicts do not depend on it.
"""

import builtins
import sys

from jaxrl_llm.sandbox.link import MUTABLE_TYPES, Link, LinkClosed, describe_failure, next_item


class JudgeFunction:
    """Represents, for the program, a function or an iterator that a test has passed to it."""

    def __init__(self, link, number, name):
        self.__link, self.__number, self.__name__ = link, number, name

    def __call__(self, *arguments, **named):
        link = self.__link
        data = [link.encode(x) for x in arguments], {name: link.encode(x) for name, x in named.items()}
        return link.decode(link.ask("call", ["yours", self.__number], "", *data)[0])

    def __iter__(self):
        return self.__link.decode(self.__link.ask("iter", ["yours", self.__number])[0])

    def __next__(self):
        following = self.__link.decode(self.__link.ask("next", ["yours", self.__number])[0])
        if following:
            return following[0]
        raise StopIteration


def serve(read_descriptor, write_descriptor, program):
    """Runs the program, and then answers the judge. program: its Python text."""
    link = Link(read_descriptor, write_descriptor, JudgeFunction)
    module = type(sys)("program")
    # The module is registered, because dataclasses and pickle look up the module of a class there.
    sys.modules["program"] = module
    error = None
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
    except BaseException as problem:
        error = problem

    def send_names():
        """Returns the global names of the program with their values. Raises: the error with which the program ended."""
        if error:
            raise error
        defined = [(name, x) for name, x in vars(module).items() if not name.startswith("__")]
        return ([[name, link.encode(x)] for name, x in defined],)

    def call_target(target, method, arguments, named):
        """Calls an object of the program for the judge. Returns the result, and the arguments that may have changed."""
        values, named_values = [link.decode(x) for x in arguments], {name: link.decode(x) for name, x in named.items()}
        result = link.encode(apply_method(link.decode(target), method, values, named_values))
        # A closed stream is skipped, because it has no content.
        changed = (x if isinstance(x, MUTABLE_TYPES) and not getattr(x, "closed", False) else None for x in values)
        return result, [link.encode(x) for x in changed]

    link.handlers = {
        "names": send_names,
        "call": call_target,
        "variable": lambda name: (link.encode(vars(module)[name]),),
        "get": lambda target, name: (link.encode(getattr(link.decode(target), name)),),
        "set": lambda target, name, value: (setattr(link.decode(target), name, link.decode(value)),),
    }
    while True:
        try:
            kind, *parts = link.receive()
            answer = link.answer(kind, parts)
            try:
                link.send(answer)
            except ValueError as problem:  # The answer is too long.
                link.send(describe_failure(problem, link))
        except LinkClosed:  # The tests have ended.
            return


def apply_method(target, method, arguments, named):
    """Returns the result of a call that the judge asks for.

    target: object of the program. method: name of its method, of a built-in function that takes it, or "" to call the
    object itself. arguments, named: positional and keyword arguments.
    """
    if method == "next":
        return next_item(target)
    if method in ("iter", "str", "repr", "bool"):
        return getattr(builtins, method)(target)
    if method == "signature":
        return signature_parts(target)
    if method in ("isinstance", "issubclass"):
        return getattr(builtins, method)(*arguments, target)
    return (getattr(target, method) if method else target)(*arguments, **named)


def signature_parts(target):
    """Returns the signature of a function as plain data, for `make_signature` on the judge's side."""
    import inspect

    signature = inspect.signature(target)

    def as_list(value):
        return [] if value is inspect.Parameter.empty else [value]

    parameters = [
        [x.name, int(x.kind), as_list(x.default), as_list(x.annotation)] for x in signature.parameters.values()
    ]
    return parameters, as_list(signature.return_annotation)
