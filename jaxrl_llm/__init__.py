"""Reinforcement learning for language models on JAX: see README.md."""

import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # One of our programs is importing its modules: Ctrl-C ends it as SIGTERM does, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

__version__ = "0.1.0"
