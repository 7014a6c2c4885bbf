"""Calls from the judge, which has the tests, to the program, which nobody has read. Each is in a sandbox of its own.

This text is the first part of both (`sandbox.program_tests`). Only plain data crosses, as JSON. For any other object
the judge gets a Handle, which answers only what no plain value could answer: it has no operators, no truth, and of the
attributes that plain values have, none, unless the test itself has built the object. So whatever a test compares is
plain data in the judge's process, and a program cannot change its tests, end them, or say that they have passed.
For an exception class of the program the judge gets an empty class with bases of its own, so a test can catch it.
A test may give functions and iterators to the program, which can call them and take their items, and nothing else.
"""

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import io
import json
import math
import os
import sys

# The module typing defines it too, but both programs would have to import that.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Bytes of a message.
LONGEST = 2**24
DEEPEST = 100  # containers in containers
REASONS = ("error", "memory", "disk", "processes", "network", "files")
# The program had ended; the trainer knows why.
GONE = "gone"
# The test needs what does not cross: no program could pass it here.
UNJUDGED = "unjudged"
TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object)


def from_hex(text):
    return int(text, 16)


# {tag: (class, value -> parts, parts -> value)} of plain data that are no containers and that JSON has not.
CODES = {
    "int": (int, lambda x: [hex(x)], from_hex),
    "complex": (complex, lambda x: [x.real, x.imag], lambda *parts: complex(*map(float, parts))),
    "bytes": (bytes, lambda x: [x.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda x: [x.hex()], bytearray.fromhex),
    "range": (range, lambda x: map(hex, (x.start, x.stop, x.step)), lambda *parts: range(*map(from_hex, parts))),
    "decimal": (decimal.Decimal, lambda x: [str(x)], decimal.Decimal),
    "fraction": (
        fractions.Fraction,
        lambda x: map(hex, x.as_integer_ratio()),
        lambda *parts: fractions.Fraction(*map(from_hex, parts)),
    ),
    "date": (datetime.date, lambda x: [x.isoformat()], datetime.date.fromisoformat),
    "datetime": (datetime.datetime, lambda x: [x.isoformat()], datetime.datetime.fromisoformat),
    "timedelta": (datetime.timedelta, lambda x: [x.days, x.seconds, x.microseconds], datetime.timedelta),
}
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": collections.Counter,
}
STREAMS = {"text": io.StringIO, "binary": io.BytesIO}
CHANGING = (*CONTAINERS.values(), *STREAMS.values(), bytearray)
TAGS = {kind: tag for tag, kind in CONTAINERS.items()}
EXTENDED = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
# Names that a test takes from here, whatever the program has under them.
PLAIN = (*(kind for kind, *_ in CODES.values()), *CONTAINERS.values())
KNOWN = {kind.__name__: kind for kind in (*PLAIN, collections.defaultdict)}
PLAIN_ATTRIBUTES = {name for kind in (*TYPES, *PLAIN) for name in dir(kind)}
# An exception of the program that would end a loop, an iterator or the judge itself is another one there.
RAISED = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup))
}


class Closed(BaseException):
    """The other side has ended, or sent what is no message."""


class Link:
    """Messages to the other side and back, over two file descriptors."""

    def __init__(self, read, write, stand_in):
        """stand_in: the class of this side for objects of the other one."""
        self.read, self.write, self.stand_in = read, write, stand_in
        # {kind of message: what answers it}.
        self.serves = {}
        self.objects, self.reason, self.closed = [], "", False
        # Whether the test needs what does not cross, and whether it has given the program an object of its own class.
        self.unjudged, self.lent = False, False
        # {id of one of the objects: its number}. The objects live as long, so no id is used again.
        self.numbers = {}
        # {number of an exception class of the other side: the class that stands for it here}.
        self.classes = {}

    def ask(self, *message):
        """Asks the other side. Returns the parts of its answer, or raises its error."""
        self.send(message)
        while True:
            kind, *more = self.receive()
            if kind == "value":
                return more
            if kind == "error":
                raise self.error(*more)
            # It needs a function of this side before it can answer.
            self.send(self.answer(kind, more))

    def answer(self, kind, more):
        try:
            return ["value", *self.serves[kind](*more)]
        except Closed:
            raise
        except BaseException as error:
            return failure(error, self)

    def error(self, kind, text, last, ended, arguments):
        """Returns the exception of this side for one of the other side."""
        if ended or type(text) is not str:
            # It has tried to end its process.
            self.reason, self.closed = "error", True
            return Closed()
        self.reason = last if last in REASONS else "error"
        kind = self.decoded(kind)
        if not is_exception(kind):
            kind = RuntimeError
        try:
            error = kind(*self.decoded(arguments))
            if str(error) == text:
                return error
        except Exception:
            # No arguments came, or the class takes others.
            pass
        return kind(text)

    def send(self, message):
        data = json.dumps(message).encode()
        if len(data) > LONGEST:
            raise ValueError("too long a message")
        # The length goes first: JSON has no end that a stream would show.
        data = memoryview(len(data).to_bytes(8, "big") + data)
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except OSError:
            self.closed = True
            raise Closed from None

    def receive(self):
        try:
            length = int.from_bytes(self.bytes(8), "big")
            if length > LONGEST:
                raise ValueError("too long a message")
            message = json.loads(self.bytes(length))
            # `type`, not isinstance: nothing of a class of the program may answer for it.
            if type(message) is list and message and type(message[0]) is str:
                return message
            raise ValueError("no message")
        except (ValueError, RecursionError, MemoryError, OSError):
            self.closed = True
            raise Closed from None

    def bytes(self, count):
        data = bytearray()
        while len(data) < count:
            more = os.read(self.read, min(count - len(data), 2**20))
            if not more:
                raise ValueError("the other side has ended")
            data += more
        return bytes(data)

    def encoded(self, value, depth=0):
        """Returns a value as JSON has it: plain data as it is or with a tag, other objects as a number."""
        kind = type(value)
        # Larger integers go as hexadecimal text: Python refuses decimals of more than 4,300 digits, and JSON has no
        # others.
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 2**63):
            return value
        if depth > DEEPEST:
            raise ValueError("containers in containers, too deep")
        if kind in TAGS and issubclass(kind, dict):
            return [TAGS[kind], *([self.encoded(k, depth + 1), self.encoded(x, depth + 1)] for k, x in value.items())]
        if kind in TAGS:
            return [TAGS[kind], *(self.encoded(x, depth + 1) for x in value)]
        if kind in (Handle, JudgeFunction):
            return ["yours", object.__getattribute__(value, f"_{kind.__name__}__number")]
        if kind is type and (value in TYPES or RAISED.get(value.__name__) is value):
            return ["type", value.__name__]
        theirs = next((number for number, known in self.classes.items() if known is value), None)
        if theirs is not None:
            return ["yours", theirs]
        if is_exception(value):
            bases = [self.encoded(base, depth + 1) for base in value.__bases__ if is_exception(base)]
            return ["error", self.number(value), value.__name__, *bases]
        for tag, (coded, parts, _) in CODES.items():
            if kind is coded:
                return [tag, *parts(value)]
        for tag, stream in STREAMS.items():
            if kind is stream:
                return [tag, self.encoded(value.getvalue()), value.tell()]
        for plain in EXTENDED if kind is not type else ():
            if isinstance(value, plain):
                # A class that extends a plain one: its content.
                return self.encoded(content(value, plain), depth)
        # The program may ask for the name of a test's function, as decorators do. The judge believes no names.
        name = getattr(value, "__name__", "") if self.stand_in is Handle else ""
        self.lent = self.lent or type(value).__module__ == "__main__"
        return ["mine", self.number(value), name if type(name) is str else ""]

    def number(self, value):
        """Returns the number of an object of this side, which is kept: the number may come back at any time."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def decoded(self, data, name="") -> "Any":
        """Returns the value of what `encoded` gave on the other side. Raises: ValueError, TypeError, if it did not."""
        if type(data) is not list:
            return data
        tag, parts = data[0], data[1:]
        if tag in CONTAINERS:
            kind = CONTAINERS[tag]
            if not issubclass(kind, dict):
                return kind(self.decoded(x) for x in parts)
            if tag == "counter":
                # By `update`: Counter(pairs) would count the pairs.
                result = kind()
                result.update({self.decoded(k): self.decoded(x) for k, x in parts})
                return result
            return kind((self.decoded(k), self.decoded(x)) for k, x in parts)
        if tag == "mine" and type(parts[0]) is int:
            return self.stand_in(self, parts[0], name if self.stand_in is Handle else parts[1])
        if tag == "yours" and type(parts[0]) is int and 0 <= parts[0] < len(self.objects):
            return self.objects[parts[0]]
        if tag == "type":
            return (RAISED | {kind.__name__: kind for kind in TYPES})[str(parts[0])]
        if tag == "error":
            number, name, *bases = parts
            bases = tuple(map(self.decoded, bases))
            if not bases or not all(map(is_exception, bases)):
                raise TypeError("an exception class has other bases")
            return self.classes.setdefault(number, type(str(name), bases, {}))
        if tag in STREAMS:
            stream = STREAMS[tag](self.decoded(parts[0]))
            stream.seek(parts[1])
            return stream
        if tag not in CODES:
            raise ValueError(f"no value has the tag {tag!r}")
        return CODES[tag][2](*parts)


def is_exception(kind):
    """Returns whether a value is an exception class, and not one of a class of its own, which might lie."""
    return type(kind) is type and issubclass(kind, Exception)


def content(value, plain):
    """Returns the content of a value whose class extends a plain one, without a method of that class."""
    if issubclass(plain, (list, tuple, set, frozenset)):
        return plain(plain.__iter__(value))
    if plain is dict:
        return dict(dict.items(value))
    if plain is str:
        return str.__str__(value)
    if plain is complex:
        return complex(complex.real.__get__(value), complex.imag.__get__(value))
    return plain(plain.__int__(value) if plain is int else plain.__float__(value) if plain is float else value)


def failure(error, link):
    ended = not isinstance(error, Exception)
    try:
        text, arguments = str(error)[:1000], error.args
    except BaseException:
        text, arguments = "", ()
    # The nearest class that the other side can have.
    kind = next((kind for kind in type(error).__mro__ if is_exception(kind)), RuntimeError)
    # EPERM, EAGAIN, EACCES, EFBIG, ENOSPC, EROFS, ENETUNREACH: what limits, mounts and the filter answer.
    numbers = {1: "files", 11: "processes", 13: "files", 27: "disk", 28: "disk", 30: "files", 101: "network"}
    last = numbers.get(error.errno or 0, "error") if isinstance(error, OSError) else "error"
    last = "memory" if isinstance(error, MemoryError) else last
    # No objects: an error gives none of its side to the other one.
    plain = all(x is None or type(x) in (bool, int, float, str) for x in arguments) and len(text) < 1000
    return ["error", link.encoded(kind), text, last, ended, link.encoded(arguments) if plain else None]


# The judge's side.


def forwarded(method, kind=None):
    """Returns a method of a Handle whose object a test has built: it asks the other side. kind: of a plain answer."""

    def ask(self, *arguments):
        if not object.__getattribute__(self, "_Handle__built"):
            raise TypeError("an object of the program is no plain data")
        answer = call(object.__getattribute__(self, "_Handle__link"), self, method, arguments, {})
        return plain_of(kind, answer) if kind else answer

    return ask


def is_built(value):
    return type(value) is Handle and object.__getattribute__(value, "_Handle__built")


def refused(self, *others):
    """Raises: TypeError, for an operator. If the test has built the object, no program could pass it here."""
    if is_built(self):
        object.__getattribute__(self, "_Handle__link").unjudged = True
    raise TypeError("an object of the program is an operand or a key: only plain data are")


def compared(self, other):
    """Raises: TypeError. An object beside plain data may be a wrong answer, so only two built ones are unjudged."""
    refused(self if is_built(other) else None)


class Handle:
    """Stands for an object of the other side that is no plain data."""

    __slots__ = ("__built", "__items", "__link", "__name", "__number")

    def __init__(self, link, number, name, built=False):
        """name: of the variable or attribute; built: by a test, of a class."""
        values = {"link": link, "number": number, "name": name, "built": built, "items": None}
        for key, value in values.items():
            # Past this class's own __setattr__, which asks the other side.
            object.__setattr__(self, f"_Handle__{key}", value)

    def __call__(self, *arguments, **named):
        result = call(self.__link, self, "", arguments, named)
        # Classes begin with a capital letter. A function that returns an object has no right to answer for a value.
        if type(result) is Handle and self.__name[:1].isupper():
            object.__setattr__(result, "_Handle__built", True)
        return result

    def __getattr__(self, name):
        if name == "__signature__":
            return signature(call(self.__link, self, "signature", (), {}))
        if (name.startswith("__") and name != "__name__") or (name in PLAIN_ATTRIBUTES and not self.__built):
            raise AttributeError(name)
        return self.__link.decoded(*self.__link.ask("get", self.__link.encoded(self), name), name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            raise AttributeError(name)
        self.__link.ask("set", self.__link.encoded(self), name, self.__link.encoded(value))

    def __eq__(self, other):
        # Known without the program: None is plain data, and an object is equal to itself.
        if other is None or (type(other) is Handle and other.__number == self.__number):
            return other is not None
        return compared(self, other)

    def __ne__(self, other):
        return not self == other

    def __instancecheck__(self, value):
        return plain_of(bool, call(self.__link, self, "isinstance", (value,), {}))

    def __subclasscheck__(self, kind):
        return plain_of(bool, call(self.__link, self, "issubclass", (kind,), {}))

    def __mro_entries__(self, bases):
        """Answers a test that extends a class of the program."""
        self.__link.unjudged = True
        raise TypeError("a class of the program is no base")

    def __next__(self):
        following = call(self.__link, self, "next", (), {})
        if following:
            return following[0]
        raise StopIteration

    def __iter__(self):
        """Returns one iterator, the same at each call, unless the test has built the object: a list has one content."""
        if self.__built or self.__items is None:
            iterator = call(self.__link, self, "iter", (), {})
            object.__setattr__(self, "_Handle__items", items(self.__link, plain_of(Handle, iterator)))
        return self.__items

    def __enter__(self):
        return call(self.__link, self, "__enter__", (), {})

    def __exit__(self, *error):
        call(self.__link, self, "__exit__", (None, None, None), {})

    __len__, __bool__ = forwarded("__len__", int), forwarded("bool", bool)
    __str__, __repr__ = forwarded("str", str), forwarded("repr", str)
    __getitem__, __setitem__, __delitem__ = map(forwarded, ("__getitem__", "__setitem__", "__delitem__"))
    __lt__ = __le__ = __gt__ = __ge__ = compared
    __hash__ = __neg__ = __abs__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refused
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = refused
    __matmul__ = __rmatmul__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = refused


class Names(dict):
    """Global names of a test. A variable of the program is read again at each use: a function may have changed it."""

    def __init__(self, link, names, variables):
        """variables: {name: data that the program has sent last}."""
        super().__init__(names)
        self.link, self.variables = link, {name: json.dumps(data) for name, data in variables.items()}

    def __getitem__(self, name):
        if name in self.variables:
            (data,) = self.link.ask("variable", name)
            # Else the test may have changed its own copy, as an argument for a function.
            if json.dumps(data) != self.variables[name]:
                self.variables[name] = json.dumps(data)
                super().__setitem__(name, self.link.decoded(data, name))
        return super().__getitem__(name)

    def __setitem__(self, name, value):
        self.variables.pop(name, None)
        super().__setitem__(name, value)


def signature(parts):
    """Returns a signature of plain data: a name, a kind, and [] or [value] of a default and of annotations."""
    import inspect

    parameters, returned = parts
    first = lambda value: value[0] if value else inspect.Parameter.empty  # noqa: E731
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect._ParameterKind(kind), default=first(default), annotation=first(annotation))
            for name, kind, default, annotation in parameters
        ],
        return_annotation=first(returned),
    )


def plain_of(kind, value):
    if type(value) is kind:
        return value
    raise TypeError(f"no {kind.__name__}")


def next_of(iterator):
    """Returns a list of the next item. The end is an empty list: a StopIteration would end a generator elsewhere."""
    nothing = object()
    following = next(iterator, nothing)
    return [] if following is nothing else [following]


def items(link, iterator):
    while following := call(link, iterator, "next", (), {}):
        yield following[0]


def call(link, handle, method, arguments, named):
    """Calls an object of the program, or a method of it. Containers among the arguments become what it made of them."""
    data = [link.encoded(x) for x in arguments], {name: link.encoded(x) for name, x in named.items()}
    result, changed = link.ask("call", link.encoded(handle), method, *data)
    for old, new in zip(arguments, changed, strict=False):
        restore(old, link.decoded(new))
    return link.decoded(result)


def restore(old, new):
    """Makes a container what the other side made of its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, collections.deque):
        old.clear()
        old.extend(new)
    elif type(old) in STREAMS.values():
        old.seek(0)
        old.truncate()
        old.write(new.getvalue())
        old.seek(new.tell())


def judge(read, write, report, tests, tolerance):
    """Runs each test, and writes a line for it: 1, or 0 and why the program failed, or GONE, or UNJUDGED.

    tests: JSON text of what `Link.encoded` makes of each. A test is Python text, or [name, of a method of Solution,
    arguments, result]. tolerance: of a float in such a result, relative; a thousandth of it is the absolute one.
    """
    link = Link(read, write, Handle)
    tests = [link.decoded(test) for test in json.loads(tests)]
    link.serves = {
        "call": lambda number, method, arguments, named: given_call(link, number, arguments, named),
        "iter": lambda number: (link.encoded(applied(link.decoded(number), "iter", (), {})),),
        "next": lambda number: (link.encoded(next_of(link.decoded(number))),),
    }
    names, variables = {}, {}
    try:
        # The program may have sent any name, such as "__builtins__".
        sent = {name: x for name, x in link.ask("names")[0] if type(name) is str and name[:2] != "__"}
        names = {name: link.decoded(x, name) for name, x in sent.items()}
        # Functions and classes are asked for once: to ask twice for each call would take twice the time.
        variables = {name: x for name, x in sent.items() if type(names[name]) is not Handle}
    except BaseException:
        link.closed = True
    for test in tests:
        passed = False
        # Once the program has ended, all tests that follow have its reason.
        link.reason, link.unjudged, link.lent = link.reason if link.closed else "", False, False
        try:
            if not link.closed:
                if isinstance(test, (list, tuple)):
                    judge_call(names, tolerance, *test)
                else:
                    judge_text(link, names, variables, test)
                passed = True
        # A wrong answer is no failure of the program, and has no reason.
        except AssertionError:
            pass
        except BaseException as error:
            failed = "memory" if isinstance(error, MemoryError) else "error"
            link.reason = link.reason or ("" if link.closed else failed)
            # The program cannot use such an object, and its error may say so.
            link.unjudged = link.unjudged or (link.lent and not link.closed and isinstance(error, Exception))
        if passed and not link.closed:
            # Without a buffer: the line is in the file before the next test, whatever ends this process.
            os.write(report, b"1\n")
        else:
            reason = UNJUDGED if link.unjudged else link.reason or (GONE if link.closed else "")
            os.write(report, f"0 {reason}\n".encode())


def given_call(link, number, arguments, named):
    """Calls a function that a test gave to the program."""
    values, more = [link.decoded(x) for x in arguments], {name: link.decoded(x) for name, x in named.items()}
    return link.encoded(link.decoded(number)(*values, **more)), []


def judge_text(link, names, variables, test):
    """Raises: an exception, if the test does not pass."""
    tree = ast.parse(test)
    used = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    modules = {x.value.id for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)}
    # A program may define a function with the name of a module, such as calendar: then the test means the module only
    # if it uses an attribute of it.
    modules = {name for name in used if name in sys.stdlib_module_names and (name in modules or name not in names)}
    # The program's names, but none that a test uses to check its results, as `all` or `math`.
    program = {name: x for name, x in names.items() if name not in KNOWN and name not in vars(builtins)}
    global_names = program | KNOWN | imported(modules) | {"__name__": "__main__"}
    variables = {name: data for name, data in variables.items() if name in used and global_names[name] is names[name]}
    if variables:
        global_names = Names(link, global_names, variables)
    exec(compile(tree, "test", "exec"), global_names)


def imported(modules):
    modules_by_name = {}
    for name in modules:
        try:
            modules_by_name[name] = __import__(name)
        except ImportError:
            # A part of the library that is not here, such as tkinter.
            continue
    return modules_by_name


def judge_call(names, tolerance, name, method, arguments, expected):
    """Raises: AssertionError, if the function does not return the expected value."""
    returned = (getattr(names["Solution"](), name) if method else names[name])(*arguments)
    # APPS puts a result into a list.
    assert agrees(returned, expected, tolerance) or agrees([returned], expected, tolerance)


def agrees(returned, expected, tolerance):
    """Returns whether data are equal. Tuples count as lists, and keys as text (JSON); floats may differ a little."""
    if isinstance(expected, (list, tuple)) and isinstance(returned, (list, tuple)):
        pairs = zip(returned, expected, strict=False)
        return len(returned) == len(expected) and all(
            agrees(item, expected_item, tolerance) for item, expected_item in pairs
        )
    if isinstance(expected, dict) and isinstance(returned, dict):
        returned, expected = ({str(k): x for k, x in value.items()} for value in (returned, expected))
        return returned.keys() == expected.keys() and all(
            agrees(returned[k], x, tolerance) for k, x in expected.items()
        )
    if isinstance(expected, float) and isinstance(returned, float):
        both_nan = math.isnan(expected) and math.isnan(returned)
        return both_nan or math.isclose(returned, expected, rel_tol=tolerance, abs_tol=tolerance / 1000)
    return returned == expected


# The program's side. It has the program's process, so nothing here is safe from the program; nothing here needs to be.


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
    stated = lambda value: [] if value is inspect.Parameter.empty else [value]  # noqa: E731
    parameters = [[x.name, int(x.kind), stated(x.default), stated(x.annotation)] for x in found.parameters.values()]
    return parameters, stated(found.return_annotation)
