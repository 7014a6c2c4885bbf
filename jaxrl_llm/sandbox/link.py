"""The link between the judge, which has the tests, and the program, which nobody has read. Each is in a sandbox.

Both begin with this text (`sandbox.program_tests`). Only plain data crosses, as JSON; any other object stays on its
side and has a number on the other one. A test may give functions and iterators to the program, which can call them and
take their items, and nothing else.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import io
import json
import os

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

    def __init__(self, read, write, stand_in, *, judges=False):
        """stand_in: the class of this side for objects of the other one; judges: this side has the tests."""
        self.read, self.write, self.stand_in, self.judges = read, write, stand_in, judges
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
            # The other side needs a function of this side before it can answer.
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
            # The other side has tried to end its process.
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
        if kind is self.stand_in:
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
                # An object of a class that extends a plain class is sent as its content.
                return self.encoded(content(value, plain), depth)
        # The program may ask for the name of a test's function, as decorators do. The judge believes no names.
        name = getattr(value, "__name__", "") if self.judges else ""
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
                # `update` sets the counts, because Counter(pairs) would count the pairs.
                result = kind()
                result.update({self.decoded(k): self.decoded(x) for k, x in parts})
                return result
            return kind((self.decoded(k), self.decoded(x)) for k, x in parts)
        if tag == "mine" and type(parts[0]) is int:
            return self.stand_in(self, parts[0], name if self.judges else parts[1])
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


def next_of(iterator):
    """Returns a list of the next item. The end is an empty list: a StopIteration would end a generator elsewhere."""
    nothing = object()
    following = next(iterator, nothing)
    return [] if following is nothing else [following]
