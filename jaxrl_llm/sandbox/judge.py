"""The judge's side of the link: runs the tests of an untrusted program, and calls the program for them.

A test gets the program's plain data as copies, and a Handle for any other object. A Handle has no operators, no truth
value, and none of the attributes that plain values have, unless the test itself has built the object. So a test
compares only plain data of this process, and a program cannot change its tests, end them, or claim that they have
passed. For an exception class of the program, the test gets an empty class with the same built-in bases, so that it can
catch it.
"""

import ast
import builtins
import collections
import json
import math
import os
import sys

from jaxrl_llm.sandbox.link import CODES, CONTAINERS, ENDED, STREAMS, TYPES, UNJUDGED, Link, next_item

# Classes of plain data, of which the link sends copies.
PLAIN_TYPES = (*(kind for kind, *_ in CODES.values()), *CONTAINERS.values())
# {name: class}. A test always gets these classes from this process, even if the program defines the same names.
KNOWN_TYPES = {kind.__name__: kind for kind in (*PLAIN_TYPES, collections.defaultdict)}
# Names of attributes that plain data have. A Handle has no such attribute unless a test has built its object.
PLAIN_ATTRIBUTES = {name for kind in (*TYPES, *PLAIN_TYPES) for name in dir(kind)}


def make_forwarder(method, answer_type=None):
    """Returns a method of Handle that calls the program's method, if a test has built the object.

    method: name of the method. answer_type: type that a plain answer must have, None for any answer.
    """

    def ask(self, *arguments):
        if not object.__getattribute__(self, "_Handle__built"):
            raise TypeError("an object of the program is no plain data")
        answer = call(object.__getattribute__(self, "_Handle__link"), self, method, arguments, {})
        return require_type(answer_type, answer) if answer_type else answer

    return ask


def is_built(value):
    """Returns whether a value is a Handle whose object the test itself has built from a class of the program."""
    return type(value) is Handle and object.__getattribute__(value, "_Handle__built")


def refuse_operator(self, *others):
    """Raises: TypeError, for an operator. If a test has built the object, the test is unjudged, not failed."""
    if is_built(self):
        object.__getattribute__(self, "_Handle__link").unjudged = True
    raise TypeError("an object of the program is an operand or a key: only plain data are")


def refuse_comparison(self, other_operand):
    """Raises: TypeError, for a comparison. The test counts as unjudged only if it has built both objects.

    An object that is compared with plain data may simply be a wrong answer.
    """
    refuse_operator(self if is_built(other_operand) else None)


class Handle:
    """Represents, for a test, an object of the program that is not plain data."""

    __slots__ = ("__builds", "__built", "__items", "__link", "__number")

    def __init__(self, link, number, builds):
        """builds: whether the object is a class, and a test calls the class by a name that is usual for classes."""
        # `built` is True if a test itself has built the object, by the call of such a class.
        values = {"link": link, "number": number, "builds": builds, "built": False, "items": None}
        for key, value in values.items():
            # object.__setattr__ is used, because this class's __setattr__ sets attributes of the program's object.
            object.__setattr__(self, f"_Handle__{key}", value)

    def __call__(self, *arguments, **named):
        result = call(self.__link, self, "", arguments, named)
        # An object that a function returns must not stand for a plain value, so only the call of a class builds one.
        if type(result) is Handle and self.__builds:
            object.__setattr__(result, "_Handle__built", True)
        return result

    def __getattr__(self, name):
        if name == "__signature__":
            return make_signature(call(self.__link, self, "signature", (), {}))
        if (name.startswith("__") and name != "__name__") or (name in PLAIN_ATTRIBUTES and not self.__built):
            raise AttributeError(name)
        return self.__link.decode(*self.__link.ask("get", self.__link.encode(self), name), name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            raise AttributeError(name)
        self.__link.ask("set", self.__link.encode(self), name, self.__link.encode(value))

    def __eq__(self, other_operand):
        # Two comparisons need no answer of the program: an object never equals None, and always equals itself.
        if other_operand is None or (type(other_operand) is Handle and other_operand.__number == self.__number):
            return other_operand is not None
        return refuse_comparison(self, other_operand)

    def __ne__(self, other_operand):
        return not self == other_operand

    def __instancecheck__(self, value):
        return require_type(bool, call(self.__link, self, "isinstance", (value,), {}))

    def __subclasscheck__(self, kind):
        return require_type(bool, call(self.__link, self, "issubclass", (kind,), {}))

    def __mro_entries__(self, bases):
        """Marks a test that extends a class of the program as unjudged. Raises: TypeError."""
        self.__link.unjudged = True
        raise TypeError("a class of the program is no base")

    def __next__(self):
        following = call(self.__link, self, "next", (), {})
        if following:
            return following[0]
        raise StopIteration

    def __iter__(self):
        """Returns an iterator; the same one at each call, unless the test has built the object."""
        if self.__built or self.__items is None:
            iterator = call(self.__link, self, "iter", (), {})
            object.__setattr__(self, "_Handle__items", iterate(self.__link, require_type(Handle, iterator)))
        return self.__items

    def __enter__(self):
        return call(self.__link, self, "__enter__", (), {})

    def __exit__(self, *error):
        call(self.__link, self, "__exit__", (None, None, None), {})

    __len__, __bool__ = make_forwarder("__len__", int), make_forwarder("bool", bool)
    __str__, __repr__ = make_forwarder("str", str), make_forwarder("repr", str)
    __getitem__, __setitem__, __delitem__ = map(make_forwarder, ("__getitem__", "__setitem__", "__delitem__"))
    __lt__ = __le__ = __gt__ = __ge__ = refuse_comparison
    __hash__ = __neg__ = __abs__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = (
        refuse_operator
    )
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = (
        refuse_operator
    )
    __matmul__ = __rmatmul__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = refuse_operator


class GlobalNames(dict):
    """The global names of a test. Variables of the program are read at each use, because calls may change them."""

    def __init__(self, link, names, variables):
        """names: {global name: value}. variables: {name of a variable of the program: data that was last received}."""
        super().__init__(names)
        self.link, self.variables = link, {name: json.dumps(data) for name, data in variables.items()}

    def __getitem__(self, name):
        if name in self.variables:
            try:
                (data,) = self.link.ask("variable", name)
            except KeyError:
                # The program has deleted the variable. Python looks for it again in this dict, without this method.
                self.pop(name, None)
                raise
            # If the data are unchanged, keep the test's copy, because the test may have changed it.
            if json.dumps(data) != self.variables[name]:
                self.variables[name] = json.dumps(data)
                super().__setitem__(name, self.link.decode(data, name))
        return super().__getitem__(name)

    def __setitem__(self, name, value):
        self.variables.pop(name, None)
        super().__setitem__(name, value)


def make_signature(parts):
    """Returns an inspect.Signature from the plain data of `signature_parts`, sent by the program's side."""
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


def require_type(kind, value):
    """Returns an answer of the program. Raises: TypeError, if the answer has another type than `kind`."""
    if type(value) is kind:
        return value
    raise TypeError(f"no {kind.__name__}")


def iterate(link, iterator):
    """Yields the items of an iterator of the program. iterator: Handle of the iterator."""
    while following := call(link, iterator, "next", (), {}):
        yield following[0]


def call(link, handle, method, arguments, named):
    """Calls an object of the program, or one of its methods, and copies changes of mutable arguments back.

    method: name of a method, "" for the object itself. named: keyword arguments.
    """
    data = [link.encode(x) for x in arguments], {name: link.encode(x) for name, x in named.items()}
    result, changed = link.ask("call", link.encode(handle), method, *data)
    for old, new in zip(arguments, changed, strict=False):
        copy_content(old, link.decode(new))
    return link.decode(result)


def copy_content(container, changed_copy):
    """Replaces the content of a mutable argument by that of its copy, which the other side has changed."""
    if type(container) is not type(changed_copy):
        return
    if isinstance(container, (list, bytearray)):
        container[:] = changed_copy
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(changed_copy)
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(changed_copy)
    elif type(container) in STREAMS.values():
        container.seek(0)
        container.truncate()
        container.write(changed_copy.getvalue())
        container.seek(changed_copy.tell())


def judge(read_descriptor, write_descriptor, report_descriptor, tests, tolerance):
    """Runs all tests, and writes a line for each: "1" if it passed, else "0 REASON".

    The descriptors are those of the link to the program, and of the report for the lines. tests: JSON text of a list of
    tests, each encoded by `Link.encode`: Python text, or [function, whether it is a method of Solution, arguments,
    result]. tolerance: relative tolerance of floats in a result; the absolute tolerance is a thousandth of it.
    """
    link = Link(read_descriptor, write_descriptor, Handle, judges=True)
    tests = [link.decode(test) for test in json.loads(tests)]
    link.handlers = {
        "call": lambda number, method, arguments, named: call_test_function(link, number, arguments, named),
        "iter": lambda number: (link.encode(iter(link.decode(number))),),
        "next": lambda number: (link.encode(next_item(link.decode(number))),),
    }
    names, variables = {}, {}
    try:
        # Names that begin with "__" are dropped, because a program may send any name, such as "__builtins__".
        sent_data = {name: x for name, x in link.ask("names")[0] if type(name) is str and name[:2] != "__"}
        names = {name: link.decode(x, name) for name, x in sent_data.items()}
        # Only variables are read again at each use. Functions and classes are read once, to save time.
        variables = {name: x for name, x in sent_data.items() if type(names[name]) is not Handle}
    except BaseException:
        link.closed = True
    for test in tests:
        passed = False
        # If the program has ended, all later tests fail for the same reason.
        link.reason, link.unjudged, link.sent_object = link.reason if link.closed else "", False, False
        try:
            if not link.closed:
                if isinstance(test, (list, tuple)):
                    judge_call(names, tolerance, *test)
                else:
                    judge_text(link, names, variables, test)
                passed = True
        # The reason of a wrong answer stays "", because the program itself did not fail.
        except AssertionError:
            pass
        except BaseException as error:
            error_reason = "memory" if isinstance(error, MemoryError) else "error"
            link.reason = link.reason or ("" if link.closed else error_reason)
            # The judge has sent the program an object of a class that the test defines, which the program cannot use.
            # The error may come from this, so the test is unjudged.
            link.unjudged = link.unjudged or (link.sent_object and not link.closed and isinstance(error, Exception))
        if passed and not link.closed:
            # os.write has no buffer, so that the line is in the file even if the next test ends this process.
            os.write(report_descriptor, b"1\n")
        else:
            reason = UNJUDGED if link.unjudged else link.reason or (ENDED if link.closed else "")
            os.write(report_descriptor, f"0 {reason}\n".encode())


def call_test_function(link, number, arguments, named):
    """Calls a function of a test, because the program asks for the call. Returns (encoded result, no changes).

    link: link to the process of the program. number: number that the link has given to the function. arguments, named:
    encoded positional and keyword arguments, of which no changes are sent back.
    """
    values, named_values = [link.decode(x) for x in arguments], {name: link.decode(x) for name, x in named.items()}
    return link.encode(link.decode(number)(*values, **named_values)), []


def judge_text(link, names, variables, test):
    """Runs a test that is Python text. Raises: any exception, if the test does not pass.

    link: link to the process of the program. names: {global name of the program: value or Handle}. variables: {global
    name: encoded value} of the program's plain data. test: Python text.
    """
    tree = ast.parse(test)
    used_names = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    modules = {x.value.id for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)}
    # A program may define a name that is also a module's, such as `calendar`. Then a test that reads an attribute, such
    # as `calendar.monthrange`, means the module. Any other test means the program's own object.
    modules = {
        name for name in used_names if name in sys.stdlib_module_names and (name in modules or name not in names)
    }
    # Names that tests use to check results, such as `all`, never come from the program.
    program_names = {name: x for name, x in names.items() if name not in KNOWN_TYPES and name not in vars(builtins)}
    global_names = program_names | KNOWN_TYPES | import_modules(modules) | {"__name__": "__main__"}
    variables = {
        name: data for name, data in variables.items() if name in used_names and global_names[name] is names[name]
    }
    # Only a test that uses variables needs GlobalNames, which asks the program for their content at each use.
    if variables:
        global_names = GlobalNames(link, global_names, variables)
    exec(compile(tree, "test", "exec"), global_names)


def import_modules(modules):
    """Returns {name: module} of the modules of the standard library that this machine has. modules: names."""
    modules_by_name = {}
    for name in modules:
        try:
            modules_by_name[name] = __import__(name)
        except ImportError:
            # Some modules of the library may be missing, such as tkinter.
            continue
    return modules_by_name


def judge_call(names, tolerance, name, method, arguments, expected):
    """Calls a function of the program. Raises: AssertionError, if it does not return the expected value.

    names: {global name of the program: value or Handle}. name: name of the function. method: True for a method of the
    program's class Solution. tolerance: relative tolerance of floats.
    """
    returned = (getattr(names["Solution"](), name) if method else names[name])(*arguments)
    # The data set APPS puts a result into a list, so both forms pass.
    assert values_agree(returned, expected, tolerance) or values_agree([returned], expected, tolerance)


def values_agree(returned, expected, tolerance):
    """Returns whether two values are equal, where tuples count as lists and keys as text, as in JSON.

    tolerance: relative tolerance of floats; the absolute tolerance is a thousandth of it.
    """
    if isinstance(expected, (list, tuple)) and isinstance(returned, (list, tuple)):
        pairs = zip(returned, expected, strict=False)
        return len(returned) == len(expected) and all(
            values_agree(item, expected_item, tolerance) for item, expected_item in pairs
        )
    if isinstance(expected, dict) and isinstance(returned, dict):
        returned, expected = ({str(k): x for k, x in value.items()} for value in (returned, expected))
        return returned.keys() == expected.keys() and all(
            values_agree(returned[k], x, tolerance) for k, x in expected.items()
        )
    if isinstance(expected, float) and isinstance(returned, float):
        both_nan = math.isnan(expected) and math.isnan(returned)
        return both_nan or math.isclose(returned, expected, rel_tol=tolerance, abs_tol=tolerance / 1000)
    return returned == expected
