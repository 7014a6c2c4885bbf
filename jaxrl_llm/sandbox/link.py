"""The link between the judge, which has the tests, and an untrusted program. Each runs in its own sandbox.

Both processes start with the text of this file (`sandbox.program_tests`). Only plain data are sent, as JSON. Any other
object stays on its side, and the other side gets a number for it. A test may give the program functions and iterators,
which the program can only call and iterate.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import io
import json
import os

# TYPE_CHECKING is defined here, because importing typing would delay the start of both processes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Largest size of a message in bytes.
MAX_MESSAGE_BYTES = 2**24
MAX_DEPTH = 100  # largest depth of nested containers
# Reasons why a test failed for which the program itself is to blame: an exception, or a limit of the sandbox.
REASONS = ("error", "memory", "disk", "processes", "network", "files")
# Reason of a test that came after the end of the program. The trainer's process knows why the program has ended.
ENDED = "gone"
# Reason of a test that needs an object which cannot be sent, so that no program could pass the test in this sandbox.
UNJUDGED = "unjudged"
# Built-in classes that are sent by their names.
TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object)


def from_hex(text):
    return int(text, 16)


# {tag: (class, value -> parts, parts -> value)} for plain data that JSON lacks, other than containers.
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
# {tag: class} of streams in memory, which are sent as content and position.
STREAMS = {"text": io.StringIO, "binary": io.BytesIO}
# Classes whose values a call may change, so that the changed content is sent back.
MUTABLE_TYPES = (*CONTAINERS.values(), *STREAMS.values(), bytearray)
TAGS = {kind: tag for tag, kind in CONTAINERS.items()}
# Plain classes that a program may extend. An object of such a class is sent as its plain content.
EXTENDABLE_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
# Exception classes that are sent as themselves. Those that would end a loop, an iterator or the judge are left out.
EXCEPTION_CLASSES = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup))
}


class LinkClosed(BaseException):
    """Raised when the other side has ended, or has sent an invalid message."""


class Link:
    """One side of the link: sends messages over a pair of file descriptors, and encodes values for them."""

    def __init__(self, read_descriptor, write_descriptor, handle_class, *, judges=False):
        """Starts without objects. The descriptors are those of two pipes, from and to the other side.

        handle_class: class that represents objects of the other side on this side. judges: whether this side has the
        tests.
        """
        self.read_descriptor, self.write_descriptor = read_descriptor, write_descriptor
        self.handle_class, self.judges = handle_class, judges
        # {kind of message: function that answers it}.
        self.handlers = {}
        self.objects, self.reason, self.closed = [], "", False
        # unjudged: whether the test needs an object that cannot be sent. sent_object: whether this side has sent an
        # object of a class that the test defines.
        self.unjudged, self.sent_object = False, False
        # {id of an object in `objects`: its number}. `objects` keeps the objects alive, so ids stay unique.
        self.numbers = {}
        # {number of an exception class of the other side: class that represents it on this side}.
        self.classes = {}

    def ask(self, *message):
        """Sends a message to the other side, and returns the parts of its answer. Raises: the error that it answers."""
        self.send(message)
        while True:
            kind, *parts = self.receive()
            if kind == "value":
                return parts
            if kind == "error":
                raise self.exception_for(*parts)
            # The other side may call a function of this side before it answers.
            self.send(self.answer(kind, parts))

    def answer(self, kind, parts):
        """Returns the message that answers a message of this kind: the parts of the result, or the error."""
        try:
            return ["value", *self.handlers[kind](*parts)]
        except LinkClosed:
            raise
        except BaseException as error:
            return describe_failure(error, self)

    def exception_for(self, kind, text, reason, ends_process, arguments):
        """Returns an exception for an error of the other side.

        kind: encoded class. text: text of the error. reason: one of REASONS. ends_process: whether the error would end
        the other side's process. arguments: encoded arguments of the exception, None if they are not plain.
        """
        if ends_process or type(text) is not str:
            # The error was not an Exception, so the other side has tried to end its process.
            self.reason, self.closed = "error", True
            return LinkClosed()
        self.reason = reason if reason in REASONS else "error"
        kind = self.decode(kind)
        if not is_exception(kind):
            kind = RuntimeError
        try:
            error = kind(*self.decode(arguments))
            if str(error) == text:
                return error
        except Exception:
            # The class may need other arguments.
            pass
        return kind(text)

    def send(self, message):
        """Sends a message, a JSON value. Raises: LinkClosed, if the other side has ended."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError("the message is too long")
        # The length goes first, because the end of JSON text cannot be seen in a stream.
        data = memoryview(len(data).to_bytes(8, "big") + data)
        try:
            while data:
                data = data[os.write(self.write_descriptor, data) :]
        except OSError:
            self.closed = True
            raise LinkClosed from None

    def receive(self):
        """Returns the next message, a list that starts with its kind. Raises: LinkClosed, also for any other data."""
        try:
            length = int.from_bytes(self.read_bytes(8), "big")
            if length > MAX_MESSAGE_BYTES:
                raise ValueError("the message is too long")
            message = json.loads(self.read_bytes(length))
            # `type` is compared, because isinstance would ask a class that the program may have changed.
            if type(message) is list and message and type(message[0]) is str:
                return message
            raise ValueError("this is not a message")
        except (ValueError, RecursionError, MemoryError, OSError):
            self.closed = True
            raise LinkClosed from None

    def read_bytes(self, count):
        data = bytearray()
        while len(data) < count:
            received = os.read(self.read_descriptor, min(count - len(data), 2**20))
            if not received:
                raise ValueError("the other side has ended")
            data += received
        return bytes(data)

    def encode(self, value, depth=0):
        """Returns a value in a form that JSON can hold: plain data, with a tag if needed; other objects as numbers."""
        kind = type(value)
        # Larger integers are sent as hexadecimal text, because JSON has only decimals, and Python refuses decimals of
        # more than 4,300 digits.
        if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 2**63):
            return value
        if depth > MAX_DEPTH:
            raise ValueError("the containers are nested too deeply")
        if kind in TAGS and issubclass(kind, dict):
            return [TAGS[kind], *([self.encode(k, depth + 1), self.encode(x, depth + 1)] for k, x in value.items())]
        if kind in TAGS:
            return [TAGS[kind], *(self.encode(x, depth + 1) for x in value)]
        if kind is self.handle_class:
            return ["yours", object.__getattribute__(value, f"_{kind.__name__}__number")]
        if kind is type and (value in TYPES or EXCEPTION_CLASSES.get(value.__name__) is value):
            return ["type", value.__name__]
        class_number = next((number for number, known_class in self.classes.items() if known_class is value), None)
        if class_number is not None:
            return ["yours", class_number]
        if is_exception(value):
            bases = [self.encode(base, depth + 1) for base in value.__bases__ if is_exception(base)]
            return ["error", self.number_of(value), value.__name__, *bases]
        for tag, (plain_type, parts, _) in CODES.items():
            if kind is plain_type:
                return [tag, *parts(value)]
        for tag, stream in STREAMS.items():
            if kind is stream:
                return [tag, self.encode(value.getvalue()), value.tell()]
        for plain in EXTENDABLE_TYPES if kind is not type else ():
            if isinstance(value, plain):
                # An object whose class extends a plain class is sent as plain content.
                return self.encode(plain_content(value, plain), depth)
        self.sent_object = self.sent_object or type(value).__module__ == "__main__"
        if not self.judges:
            return ["mine", self.number_of(value), issubclass(kind, type)]
        # The judge sends the names of functions, because decorators of the program may read them.
        name = getattr(value, "__name__", "")
        return ["mine", self.number_of(value), name if type(name) is str else ""]

    def number_of(self, value):
        """Returns the number of an object of this side, and keeps the object, because the number may come back."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def decode(self, data, name="") -> "Any":
        """Returns the value that the other side has encoded. Raises: ValueError, TypeError, if the data are invalid.

        name: variable or attribute of the program that holds the value, "" if none does.
        """
        if type(data) is not list:
            return data
        tag, parts = data[0], data[1:]
        if tag in CONTAINERS:
            kind = CONTAINERS[tag]
            if not issubclass(kind, dict):
                return kind(self.decode(x) for x in parts)
            if tag == "counter":
                # `update` sets the counts, because Counter(pairs) would count the pairs.
                result = kind()
                result.update({self.decode(k): self.decode(x) for k, x in parts})
                return result
            return kind((self.decode(k), self.decode(x)) for k, x in parts)
        if tag == "mine" and type(parts[0]) is int:
            # The name decides too, because the program chooses what is a class, but the test chooses the names.
            builds = name[:1].isupper() and parts[1:] == [True]
            return self.handle_class(self, parts[0], builds if self.judges else parts[1])
        if tag == "yours" and type(parts[0]) is int and 0 <= parts[0] < len(self.objects):
            return self.objects[parts[0]]
        if tag == "type":
            return (EXCEPTION_CLASSES | {kind.__name__: kind for kind in TYPES})[str(parts[0])]
        if tag == "error":
            number, name, *bases = parts
            bases = tuple(map(self.decode, bases))
            if not bases or not all(map(is_exception, bases)):
                raise TypeError("an exception class must have exception classes as bases")
            return self.classes.setdefault(number, type(str(name), bases, {}))
        if tag in STREAMS:
            stream = STREAMS[tag](self.decode(parts[0]))
            stream.seek(parts[1])
            return stream
        if tag not in CODES:
            raise ValueError(f"no value has the tag {tag!r}")
        return CODES[tag][2](*parts)


def is_exception(kind):
    """Returns whether a value is an exception class without a metaclass, which could lie about the class."""
    return type(kind) is type and issubclass(kind, Exception)


def plain_content(value, plain):
    """Returns the content of a value whose class extends `plain`, without calling methods of that class."""
    if issubclass(plain, (list, tuple, set, frozenset)):
        return plain(plain.__iter__(value))
    if plain is dict:
        return dict(dict.items(value))
    if plain is str:
        return str.__str__(value)
    if plain is complex:
        return complex(complex.real.__get__(value), complex.imag.__get__(value))
    return plain(plain.__int__(value) if plain is int else plain.__float__(value) if plain is float else value)


def describe_failure(error, link):
    """Returns the message about an exception. `Link.exception_for` makes an exception of it on the other side."""
    ends_process = not isinstance(error, Exception)
    try:
        text, arguments = str(error)[:1000], error.args
    except BaseException:
        text, arguments = "", ()
    # Find the nearest base class that can be sent.
    kind = next((kind for kind in type(error).__mro__ if is_exception(kind)), RuntimeError)
    # These are the error numbers (EPERM, EAGAIN, EACCES, EFBIG, ENOSPC, EROFS, ENETUNREACH) of the sandbox's limits.
    numbers = {1: "files", 11: "processes", 13: "files", 27: "disk", 28: "disk", 30: "files", 101: "network"}
    reason = numbers.get(error.errno or 0, "error") if isinstance(error, OSError) else "error"
    reason = "memory" if isinstance(error, MemoryError) else reason
    # Arguments are sent only if they are plain, so that an error never hands an object to the other side.
    are_plain = all(x is None or type(x) in (bool, int, float, str) for x in arguments) and len(text) < 1000
    return ["error", link.encode(kind), text, reason, ends_process, link.encode(arguments) if are_plain else None]


def next_item(iterator):
    """Returns [next item], or [] at the end. StopIteration is avoided, because it would end a generator elsewhere."""
    no_item = object()
    following = next(iterator, no_item)
    return [] if following is no_item else [following]
