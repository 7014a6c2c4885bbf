"""The judge's side of the link: runs the tests, and calls the program.

For an object of the program that is no plain data a test gets a Handle, which answers only what no plain value could
answer: it has no operators, no truth, and of the attributes that plain values have, none, unless the test itself has
built the object. So whatever a test compares is plain data in this process, and a program cannot change its tests, end
them, or say that they have passed. For an exception class of the program the test gets an empty class with bases of its
own, so it can catch it.
"""

import ast
import builtins
import collections
import json
import math
import os
import sys

from jaxrl_llm.sandbox.link import CODES, CONTAINERS, GONE, STREAMS, TYPES, UNJUDGED, Link, next_of

# Names that a test takes from here, whatever the program has under them.
PLAIN = (*(kind for kind, *_ in CODES.values()), *CONTAINERS.values())
KNOWN = {kind.__name__: kind for kind in (*PLAIN, collections.defaultdict)}
PLAIN_ATTRIBUTES = {name for kind in (*TYPES, *PLAIN) for name in dir(kind)}


def forwarded(method, kind=None):
    """Returns a method of a Handle that asks the other side, if a test has built the object.

    kind: type that a plain answer must have, None if any answer will do.
    """

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
        """name: variable or attribute that holds the object; built: whether a test built the object from a class."""
        values = {"link": link, "number": number, "name": name, "built": built, "items": None}
        for key, value in values.items():
            # The call bypasses this class's own __setattr__, which asks the other side.
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


class GlobalNames(dict):
    """Global names of a test. A variable of the program is read again at each use: a function may have changed it."""

    def __init__(self, link, names, variables):
        """variables: {name: data that the program has sent last}."""
        super().__init__(names)
        self.link, self.variables = link, {name: json.dumps(data) for name, data in variables.items()}

    def __getitem__(self, name):
        if name in self.variables:
            try:
                (data,) = self.link.ask("variable", name)
            except KeyError:
                # The program has deleted it. Python looks for it once more in this dict, without this method.
                self.pop(name, None)
                raise
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

    def first(value):
        return value[0] if value else inspect.Parameter.empty

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

    tests: JSON text of each test as `Link.encoded` returns it. A test is Python text, or [name of a method of Solution,
    arguments, result]. tolerance: relative tolerance of a float in a result; a thousandth of it is the absolute one.
    """
    link = Link(read, write, Handle, judges=True)
    tests = [link.decoded(test) for test in json.loads(tests)]
    link.serves = {
        "call": lambda number, method, arguments, named: given_call(link, number, arguments, named),
        "iter": lambda number: (link.encoded(iter(link.decoded(number))),),
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
            # The write has no buffer, so that the line is in the file before the next test, whatever ends this process.
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
        global_names = GlobalNames(link, global_names, variables)
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
