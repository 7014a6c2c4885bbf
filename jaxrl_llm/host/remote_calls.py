"""Calls between two sandboxes: one has a program that nobody has read, the other the tests of it.

This text is the first part of both programs (`host.program_tests`). The side of the tests never runs code of the other
side: it gets plain values, and a Remote for every other object. A Remote is never equal to a plain value unless its
content is. So a program cannot change its tests, end them, or say that they have passed.
"""

import builtins
import io
import operator
import os
import pickle
import sys

import __main__

LONGEST = 2**24  # bytes of a message
PLAIN: "tuple[type, ...]" = (
    *(bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, dict, set, frozenset, range),
)
SAFE = {("decimal", "Decimal"), ("fractions", "Fraction")}
SAFE |= {("datetime", name) for name in ("date", "datetime", "timedelta")}
SAFE |= {("builtins", kind.__name__) for kind in PLAIN}
METHODS = ["getitem", "setitem", "delitem", "len", "iter", "next", "bool", "str", "repr", "int", "float", "abs", "neg"]
METHODS += ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "floordiv", "mod", "pow", "enter", "exit"]
# Built-in functions: without the method they raise TypeError, as Python expects it.
FUNCTIONS = {f"__{f.__name__}__": f for f in (bool, str, repr, iter, next, len, int, float, abs)}


class Link:
    """Messages to the other side and back, over two file descriptors."""

    def __init__(self, read, write, serves):
        """serves: what this side does for the other one."""
        self.read, self.write, self.serves = read, write, serves
        self.objects, self.reason = [], ""

    def ask(self, *message):
        """Asks the other side. Returns its answer, or raises its error."""
        self.put(self.encoded(message))
        kind, *more = self.receive()
        while kind not in ("value", "error"):  # it needs a function of this side before it can answer
            self.reply(kind, *more)
            kind, *more = self.receive()
        if kind == "value":
            value, arguments = more
            for old, new in zip(message[2] if message[0] == "call" else (), arguments, strict=False):
                restore(old, new)
            return value
        name, text, self.reason = more
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            raise kind(text)
        raise RuntimeError(text)

    def reply(self, kind, *more):
        """Does what the other side asks for, and answers."""
        try:
            if kind not in self.serves:
                raise RuntimeError(f"{kind} is not allowed")
            data = self.encoded(("value", *answer(kind, *more)))
        except BaseException as error:
            data = self.encoded(failure(error))
        self.put(data)

    def encoded(self, message):
        data = io.BytesIO()
        Writer(data, self).dump(message)
        return data.getvalue()

    def put(self, data):
        data = memoryview(len(data).to_bytes(8, "big") + data)
        while data:
            data = data[os.write(self.write, data) :]

    def receive(self):
        length = int.from_bytes(self.bytes(8), "big")
        if length > LONGEST:
            raise EOFError("too long a message")
        return Reader(io.BytesIO(self.bytes(length)), self).load()

    def bytes(self, count):
        data = b""
        while len(data) < count:
            more = os.read(self.read, min(count - len(data), 2**20))
            if not more:
                raise EOFError("the other side has ended")
            data += more
        return data


class Writer(pickle.Pickler):
    """Writes plain values, and numbers for all other objects."""

    def __init__(self, file, link):
        super().__init__(file, protocol=5)
        self.link = link

    def persistent_id(self, value):
        if type(value) is Remote:
            return ("yours", object.__getattribute__(value, "_number"))
        kind = value if isinstance(value, type) else type(value)
        if value is None or type(value) in PLAIN or is_safe(kind):
            return None
        self.link.objects.append(value)
        return ("mine", len(self.link.objects) - 1)


class Reader(pickle.Unpickler):
    """Reads what a Writer of the other side wrote. Whatever that is, no code of the other side runs."""

    def __init__(self, file, link):
        super().__init__(file)
        self.link = link

    def find_class(self, module, name):
        if (module, name) in SAFE:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, number):
        whose, number = number
        return Remote(self.link, number) if whose == "mine" else self.link.objects[number]


def is_safe(kind):
    name = kind.__module__, kind.__qualname__
    return name in SAFE and getattr(sys.modules.get(name[0]), name[1], None) is kind


class Remote:
    """Stands for an object of the other side."""

    def __init__(self, link, number):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments, **named):
        return self._link.ask("call", self, arguments, named)

    def __getattr__(self, name):
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name, value):
        return self._link.ask("setattr", self, name, value)

    def __eq__(self, other):
        if type(other) is Remote:
            return bool(self._link.ask("equal", self, other))
        content = self._link.ask("plain", self)
        return type(content) is not Remote and content == other

    def __hash__(self):
        return hash(self._number)


def method(name):
    return lambda self, *arguments: self._link.ask("method", self, name, arguments)


def comparison(name):
    """Compares contents: an object of the program must not decide whether a test passes."""

    def compare(self, other):
        content = self._link.ask("plain", self)
        return NotImplemented if type(content) is Remote else getattr(operator, name)(content, other)

    return compare


for _name in METHODS:
    setattr(Remote, f"__{_name}__", method(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", comparison(_name))


def restore(old, new):
    """Makes a container what the other side made of its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


def plain(value):
    """Returns the content of a value whose class extends a plain one; else the value."""
    for kind in PLAIN[1:]:
        if isinstance(value, kind):
            return kind(value)
    return value


def answer(kind, target, *more):
    """Does what the other side asks for. Returns the result, and the arguments after a call."""
    if kind == "call":
        arguments, named = more
        return target(*arguments, **named), arguments
    if kind == "method":
        name, arguments = more
        return (FUNCTIONS[name](target) if name in FUNCTIONS else getattr(target, name)(*arguments)), ()
    return {"getattr": getattr, "setattr": setattr, "equal": operator.eq, "plain": plain}[kind](target, *more), ()


def failure(error):
    return "error", type(error).__name__, str(error)[:1000], __main__.reason_of(error)


def serve(read, write, program):
    """Runs the program, and then answers the side of the tests."""
    link, names = Link(read, write, ("call", "method", "getattr", "setattr", "equal", "plain")), {"__name__": "program"}
    try:
        exec(compile(program, "program", "exec"), names)
        data = link.encoded(("value", {name: x for name, x in names.items() if not name.startswith("__")}, ()))
    except BaseException as error:
        data = link.encoded(failure(error))
    link.put(data)
    while True:
        try:
            asked = link.receive()
        except EOFError:  # the tests have ended
            return
        link.reply(*asked)


def run(read, write, report, tests):
    """Runs each test, and writes a line for it: 1 or 0, and why the program failed."""
    link = Link(read, write, ("call",))  # functions that a test gives to the program
    names, gone = {}, ""
    try:
        kind, *found = link.receive()
        names, gone = (names_of(found[0]), "") if kind == "value" else ({}, found[2])
    except EOFError:
        gone = "error"
    for test in tests:
        link.reason, passed = gone, False
        try:
            code = compile(test, "test", "exec")
            modules = {name: __import__(name) for name in code.co_names if name in sys.stdlib_module_names}
            exec(code, {**names, **modules, "__name__": "test", "check_call": check_call})
            passed = not gone
        except AssertionError:
            pass
        except Exception:
            link.reason = link.reason or "error"
        os.write(report, f"{passed:d} {'' if passed else link.reason}\n".encode())


def names_of(found):
    """Returns what the program defines, but no name that a test may use to check its results, as `all` or `math`.

    The program may have sent anything, such as its own "__builtins__".
    """
    taken = {*dir(builtins), *sys.stdlib_module_names}
    return {k: x for k, x in found.items() if type(k) is str and not k.startswith("__") and k not in taken}


def check_call(function, arguments, expected):
    """Raises: AssertionError, if the function does not return the expected value. Tuples count as lists (JSON)."""
    found, expected = as_json(function(*arguments)), as_json(expected)
    assert found == expected or [found] == expected  # APPS puts a result into a list


def as_json(value):
    if isinstance(value, (list, tuple)):
        return [as_json(x) for x in value]
    return {str(k): as_json(x) for k, x in value.items()} if isinstance(value, dict) else value
