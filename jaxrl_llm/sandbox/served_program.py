"""The program's side of the link: runs the program, and answers the judge.

It has the program's process, so nothing here is safe from the program; nothing here needs to be.
"""

import builtins
import sys

from jaxrl_llm.sandbox.link import CHANGING, Closed, Link, failure, next_of


class JudgeFunction:
    """A function or an iterator of the judge's side that a test gave to the program."""

    def __init__(self, link, number, name):
        self.__link, self.__number, self.__name__ = link, number, name

    def __call__(self, *arguments, **named):
        link = self.__link
        data = [link.encoded(x) for x in arguments], {name: link.encoded(x) for name, x in named.items()}
        return link.decoded(link.ask("call", ["yours", self.__number], "", *data)[0])

    def __iter__(self):
        return self.__link.decoded(self.__link.ask("iter", ["yours", self.__number])[0])

    def __next__(self):
        following = self.__link.decoded(self.__link.ask("next", ["yours", self.__number])[0])
        if following:
            return following[0]
        raise StopIteration


def serve(read, write, program):
    """Runs the program, and then answers the judge."""
    link = Link(read, write, JudgeFunction)
    module = type(sys)("program")
    # dataclasses and pickle look up the module of a class there.
    sys.modules["program"] = module
    error = None
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
    except BaseException as problem:
        error = problem

    def names():
        if error:
            raise error
        defined = [(name, x) for name, x in vars(module).items() if not name.startswith("__")]
        return ([[name, link.encoded(x)] for name, x in defined],)

    def called(target, method, arguments, named):
        values, more = [link.decoded(x) for x in arguments], {name: link.decoded(x) for name, x in named.items()}
        result = link.encoded(applied(link.decoded(target), method, values, more))
        # A closed stream has no content.
        changed = (x if isinstance(x, CHANGING) and not getattr(x, "closed", False) else None for x in values)
        return result, [link.encoded(x) for x in changed]

    link.serves = {
        "names": names,
        "call": called,
        "variable": lambda name: (link.encoded(vars(module)[name]),),
        "get": lambda target, name: (link.encoded(getattr(link.decoded(target), name)),),
        "set": lambda target, name, value: (setattr(link.decoded(target), name, link.decoded(value)),),
    }
    while True:
        try:
            kind, *more = link.receive()
            answer = link.answer(kind, more)
            try:
                link.send(answer)
            except ValueError as problem:  # too long
                link.send(failure(problem, link))
        except Closed:  # the tests have ended
            return


def applied(target, method, arguments, named):
    if method == "next":
        return next_of(target)
    if method in ("iter", "str", "repr", "bool"):
        return getattr(builtins, method)(target)
    if method == "signature":
        return signature_parts(target)
    if method in ("isinstance", "issubclass"):
        return getattr(builtins, method)(*arguments, target)
    return (getattr(target, method) if method else target)(*arguments, **named)


def signature_parts(target):
    """Returns what `signature` takes on the other side."""
    import inspect

    found = inspect.signature(target)

    def stated(value):
        return [] if value is inspect.Parameter.empty else [value]

    parameters = [[x.name, int(x.kind), stated(x.default), stated(x.annotation)] for x in found.parameters.values()]
    return parameters, stated(found.return_annotation)
